"""A model's folder as Hugging Face lays it out: config.json, shards with an index, a tokenizer."""

from __future__ import annotations

import fnmatch
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_hdp.convert.files.safetensors_file import Stored, read_header

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5")
_MOST_CARRIED_BYTES = 100 << 20  # a tokenizer has 20 MB at most; weights under other names have not


def read_json(path: Path) -> dict[str, Any]:
    """The object that a file holds.

    Raises:
        ValueError: there is no such file, or it holds something else.
    """
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(
            f"{path}: found no such file, expected a model's folder as transformers saves it: give "
            "the folder that holds config.json"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error}): fetch it again") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: found {type(found).__name__}, expected a JSON object")
    return found


def find_tensors(folder: Path) -> dict[str, Stored]:
    """Where each tensor of a model lies, by name; only headers are read.

    Raises:
        ValueError: a shard or the index is missing, incomplete or does not fit the others.
    """
    if (folder / INDEX).exists():
        return _by_index(folder)
    if (folder / SINGLE).exists():
        return read_header(folder / SINGLE)
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    if shards:
        raise ValueError(
            f"{folder}: found {len(shards)} shards ({shards[0]}, ...) without {INDEX}, expected it "
            "beside them: fetch it, it says which shards there are"
        )
    others = sorted(path.name for path in folder.glob("*.bin"))
    found = f"{others[0]}" if others else "no weights"
    raise ValueError(
        f"{folder}: found {found}, expected {SINGLE} or shards with {INDEX}: fetch them, or save "
        "the model with transformers' save_pretrained"
    )


def _by_index(folder: Path) -> dict[str, Stored]:
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{folder / INDEX}: found no weight_map, expected one: fetch it again")
    names = sorted(set(map(str, weight_map.values())))
    for name in names:  # a link in the folder may lead out of it: such is Hugging Face's cache
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(
                f"{folder / INDEX}: found the shard {name!r}, expected the name of a file in its "
                "folder: fetch the index again"
            )
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"{folder}: found {len(names) - len(missing)} of {len(names)} shards, expected those "
            f"of {INDEX}: fetch {listed(missing)}"
        )
    shards = {name: read_header(folder / name) for name in names}
    absent = [name for name, shard in weight_map.items() if name not in shards[str(shard)]]
    if absent:
        raise ValueError(
            f"{folder / INDEX} speaks of tensors that their shards do not hold: {listed(absent)}: "
            "fetch index and shards of the same revision"
        )
    found: dict[str, Stored] = {}
    for tensors in shards.values():
        found.update(tensors)
    return found


def listed(names: list[str], most: int = 8) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def carry(source: Path, target: Path, config: Mapping[str, Any]) -> None:
    """Copies what belongs to a model besides its weights: tokenizer, templates, code, licence.

    Its configuration too, which is written anew if it is to hold something else.
    """
    target.mkdir(exist_ok=True)
    for path in sorted(source.iterdir()):
        is_weights = any(fnmatch.fnmatch(path.name, pattern) for pattern in _WEIGHTS)
        if path.is_file() and not is_weights and path.stat().st_size <= _MOST_CARRIED_BYTES:
            shutil.copyfile(path, target / path.name)
    if config != read_json(target / CONFIG):
        text = json.dumps(config, indent=2, sort_keys=True)
        (target / CONFIG).write_text(f"{text}\n")


def write_index(folder: Path, shard_of: Mapping[str, str], num_bytes: int) -> None:
    """Writes the index of a model in several shards."""
    index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(shard_of.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

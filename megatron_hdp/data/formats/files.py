"""Which files a source names: one, those below a folder, those of a pattern, a saved dataset's."""

import fnmatch
import glob as globbing
import os
from collections.abc import Iterator
from typing import Any

import orjson

from megatron_hdp.data.formats.energon import energon_shards
from megatron_hdp.data.spec import SourceSpec

_SPLITS, _STATE, _INFO = "dataset_dict.json", "state.json", "dataset_info.json"
_SAVED = "a Hugging Face dataset saved to disk"


def kind_of(spec: SourceSpec) -> str:
    """Return what a source is: ``tokens`` (a ``.bin/.idx`` pair) or what its rows are.

    ``auto`` is a pair where ``PATH.idx`` exists, else text.

    Raises:
        ValueError: ``auto``, and the path is one file of a pair.
    """
    if spec.format != "auto":
        return spec.format
    if os.path.isfile(spec.path + ".idx"):
        return "tokens"
    prefix, suffix = os.path.splitext(spec.path)
    if suffix in (".bin", ".idx") and os.path.isfile(prefix + ".idx"):
        raise ValueError(
            f"source {spec.name}: {spec.path} is one file of a .bin/.idx pair, expected the name "
            f"that both share: give {prefix}"
        )
    return "text"


def files_of(path: str, glob: str | None) -> list[str]:
    """Return the files that a path stands for, in the order in which their documents come.

    Args:
        path: a file, a folder (walked in sorted order; a Hugging Face dataset saved to disk, or
            one that Energon prepared, in the order that it gives itself), or a pattern with ``*``.
        glob: names to take from a folder; None: all.

    Raises:
        ValueError: nothing is found, or a dataset holds several splits.
    """
    if os.path.isdir(path):
        files = files_below(path, glob)
        expected = f"whose name matches the glob {glob!r}" if glob else "in it"
    elif os.path.lexists(path) or not any(letter in path for letter in "*?["):
        if not os.path.isfile(path):
            raise ValueError(
                f"{path}: no such file or folder, expected one with documents, or a pattern with *"
            )
        return [path]
    else:
        files = sorted(filter(os.path.isfile, globbing.glob(path, recursive=True)))
        expected = "whose name matches it"
    if not files:
        raise ValueError(f"{path}: no file {expected}, expected one or more: change path or glob")
    return files


def files_below(folder: str, glob: str | None) -> list[str]:
    """Return the files of a folder and those below it, sorted, whose name matches ``glob``.

    Raises:
        ValueError: it is a saved dataset of several splits, or one that lacks files; or a data set
            of Energon that does.
    """
    if glob is None and (saved := _saved_dataset(folder)) is not None:
        return saved
    if glob is None and (shards := energon_shards(folder)) is not None:
        return shards
    return list(_walk(folder, glob or "*"))


def _walk(folder: str, glob: str) -> Iterator[str]:
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(fnmatch.filter(names, glob)):
            path = os.path.join(parent, name)
            if os.path.isfile(path):
                yield path


def _saved_dataset(folder: str) -> list[str] | None:
    """Return the files of a dataset that ``save_to_disk`` wrote; None if the folder is none."""
    splits = os.path.join(folder, _SPLITS)
    if os.path.isfile(splits):
        names = _read(splits).get("splits")
        example = os.path.join(folder, names[0] if isinstance(names, list) and names else "train")
        raise ValueError(
            f"{folder} is {_SAVED} with the splits {names}, expected one of them: give {example}"
        )
    state = os.path.join(folder, _STATE)
    if not os.path.isfile(state) or not os.path.isfile(os.path.join(folder, _INFO)):
        return None
    try:
        names = [one["filename"] for one in _read(state)["_data_files"]]
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{state} names no files under _data_files, expected those of {_SAVED}: save it again, "
            "or take its files with a glob"
        ) from error
    files = [os.path.join(folder, os.path.basename(name)) for name in names]
    for path in files:
        if not os.path.isfile(path):
            raise ValueError(f"{path}: no such file, expected what {state} names: copy it again")
    return files


def _read(path: str) -> dict[str, Any]:
    with open(path, "rb") as stream:
        raw = stream.read()
    try:
        found = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ValueError(
            f"{path} is no JSON ({error}), expected what describes {_SAVED}"
        ) from error
    return found if isinstance(found, dict) else {}

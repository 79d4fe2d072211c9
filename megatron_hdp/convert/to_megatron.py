"""From Hugging Face's files to a checkpoint that Megatron loads on any layout."""

from __future__ import annotations

import fnmatch
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_hdp.convert.families.flags import as_yaml
from megatron_hdp.convert.families.registry import family_of, flags_of
from megatron_hdp.convert.families.table import Config, Family, Piece, by_file, pieces
from megatron_hdp.convert.families.vision import language_of, naming_of, with_language
from megatron_hdp.convert.files import dist_writer, hf_folder
from megatron_hdp.convert.files.dist_writer import Chunk, DistFile
from megatron_hdp.convert.files.hf_folder import CONFIG, SINGLE, listed
from megatron_hdp.convert.files.quantised import (
    Tensor,
    as_read,
    require_weight,
    without_quantisation,
)
from megatron_hdp.convert.files.safetensors_file import DTYPES, Readable, SafetensorsWriter, Stored
from megatron_hdp.convert.files.workplace import Workplace, require_new, workplace
from megatron_hdp.data.prepare import progress_bar
from megatron_hdp.megatron.checkpoint import released
from megatron_hdp.megatron.checkpoint.checksums import FileSum
from megatron_hdp.megatron.checkpoint.folder import MODEL_FILES, RELEASE

FILE_BYTES = 1 << 30
"""Of a checkpoint's file: what a run that is killed loses at most."""
MODEL_YAML = "model.yaml"
_VERSION = 1  # of what is written; another one does not go on with it
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "tekken.json")


@dataclass(frozen=True)
class Model:
    """A model of Hugging Face and what it becomes."""

    folder: Path
    whole: Config
    """What will stand beside the checkpoint."""
    config: Config
    """Of the language model; in bfloat16, if the files hold fewer bits."""
    family: Family
    flags: dict[str, Any]
    tensors: dict[str, Tensor]
    pieces: list[Piece]
    pictures: dict[str, Stored]
    """Tensors of what makes rows of pictures."""

    @classmethod
    def find(cls, folder: Path) -> Model:
        """Reads what a folder says of itself.

        Raises:
            ValueError: it is not all there, or no model that can be converted; says why.
        """
        whole = hf_folder.read_json(folder / CONFIG)
        written = language_of(whole)
        family = family_of(written, str(folder / CONFIG))
        try:
            config = without_quantisation(written)
        except ValueError as error:
            raise ValueError(f"{folder / CONFIG}: {error}") from None
        flags = flags_of(family, config, str(folder / CONFIG))
        stored = hf_folder.find_tensors(folder)
        naming = naming_of(whole, stored)
        pictures = {name: one for name, one in stored.items() if naming.is_of_pictures(name)}
        of_text = {
            naming.of_language_model(name): one
            for name, one in stored.items()
            if name not in pictures
        }
        tensors = as_read(written, of_text)
        plan = pieces(family, config, stacked=is_stacked(flags))
        _require_all(folder, family, config, tensors, plan)
        whole = with_language(whole, config)
        return cls(folder, whole, config, family, flags, tensors, plan, pictures)

    def num_bytes(self, piece: Piece) -> int:
        """Of its tensors."""
        found = 0
        for entry in piece.entries:
            stored = self.tensors[entry.name]
            found += stored.num_bytes // (1 if entry.part is None else stored.shape[0])
        return found

    def identity(self) -> str:
        """What decides the content of its checkpoint."""
        shards = {one.path: one.path.stat() for one in self.tensors.values()}
        content = {
            "version": _VERSION,
            "config": self.whole,
            "shards": [(path.name, at.st_size, at.st_mtime_ns) for path, at in shards.items()],
            "tensors": {name: one.path.name for name, one in self.tensors.items()},
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def is_stacked(flags: Mapping[str, Any]) -> bool:
    """Whether Megatron keeps the layers of a model in one tensor: not if they differ."""
    return "moe_layer_freq" not in flags


def to_megatron(folder: Path, target: Path, yaml: Path | None, say: Callable[[str], None]) -> None:
    """Converts the model in `folder`.

    Args:
        folder: with config.json, safetensors and perhaps a tokenizer.
        target: of the checkpoint, made here: what ``--load`` takes.
        yaml: where to write the model's flags as well.
        say: prints one line.

    Raises:
        ValueError: what was found, expected, and the remedy; nothing half-written is at `target`.
        OSError: a file cannot be read or written.
    """
    require_new(target)
    if yaml is not None and yaml.exists():
        raise ValueError(f"--config {yaml}: found a file there, expected none: give another name")
    model = Model.find(folder)
    text = _yaml_of(model, target)
    patterns = model.family.left_out(model.config)
    if left := [name for name in model.tensors if _is_one_of(name, patterns)]:
        say(
            f"{len(left):,} tensors of layers that predict further tokens are left out ("
            f"{left[0]}, ...): they are not trained, and will not come back"
        )
    with workplace(target, model.identity(), say) as work:
        release = work.folder / RELEASE
        release.mkdir(exist_ok=True)
        files, sums = _write_tensors(model, work, release)
        _write_rest(model, release, files, sums)
        hf_folder.carry(folder, work.folder / MODEL_FILES, model.whole)
        if model.pictures:
            copy_tensors(model.pictures, work.folder / MODEL_FILES / SINGLE)
        (work.folder / MODEL_YAML).write_text(text)
    if yaml is not None:
        yaml.write_text(text)


def _write_tensors(
    model: Model, work: Workplace, release: Path
) -> tuple[list[tuple[str, list[Chunk]]], dict[str, FileSum]]:
    """The files of tensors, those of earlier runs included, and their checksums."""
    groups = by_file(model.pieces, model.num_bytes, FILE_BYTES)
    total = sum(map(model.num_bytes, model.pieces))
    files, sums = [], {}
    with progress_bar("convert", total) as tell:
        for number, group in enumerate(groups):
            name = f"__{number}_0.distcp"
            record = work.record_of(name)
            if record is None:
                record = _write_file(model, group, release / name, tell)
                work.finish(name, record)
            else:
                tell(sum(map(model.num_bytes, group)))
            files.append((name, [dist_writer.from_record(one) for one in record["chunks"]]))
            sums[name] = FileSum(**record["sum"])
    return files, sums


def _write_file(
    model: Model, group: Sequence[Piece], path: Path, tell: Callable[[int], Any]
) -> dict[str, Any]:
    with closing(DistFile(path)) as file:
        for piece in group:
            _write_piece(model, piece, file)
            tell(model.num_bytes(piece))
    chunks = [dist_writer.as_record(chunk) for chunk in file.chunks]
    return {"chunks": chunks, "sum": asdict(FileSum.of_file(path))}


def _write_piece(model: Model, piece: Piece, file: DistFile) -> None:
    """A function of its own, so that no tensor outlives it."""
    tensors = [model.tensors[entry.name].read(entry.part) for entry in piece.entries]
    tensor = piece.layout.to_megatron(tensors, model.family.sizes(model.config))
    keys = (piece.key, *piece.also)
    file.write(keys, piece.shape, piece.offsets, piece.lengths, tensor)


def _write_rest(
    model: Model,
    release: Path,
    files: list[tuple[str, list[Chunk]]],
    sums: dict[str, FileSum],
) -> None:
    """What Megatron reads besides weights."""
    name = f"__{len(files)}_0.distcp"
    with closing(DistFile(release / name)) as file:
        empty = file.write_nothing(sorted(set(_states(model.pieces))))
    sums[name] = FileSum.of_file(release / name)
    dist_writer.write_metadata(release, files, (name, empty))
    padded = {"padded_vocab_size": model.flags["vocab_size"]}
    released.write_common(release, model.flags | {"seq_length": _longest(model)} | padded)
    released.finish(release, sums)


def copy_tensors(tensors: Mapping[str, Readable], path: Path) -> None:
    """Writes tensors of other files, or of a checkpoint, into one, bit for bit."""
    told = {name: (DTYPES[one.dtype], one.shape) for name, one in sorted(tensors.items())}
    with closing(SafetensorsWriter(path, told)) as file:
        for name in told:
            file.write(name, tensors[name].read())


def _states(plan: Sequence[Piece]) -> Iterator[str]:
    """Keys of what modules keep besides weights, nothing; TransformerEngine's modules ask for more.

    Megatron's modules without such a state look for it all the same.
    """
    for piece in plan:
        num_fronts = len(piece.shape) - len(piece.region)
        place, of = piece.offsets[:num_fronts], piece.shape[:num_fronts]
        for key in (piece.key, *piece.also):
            module, _, last = key.rpartition(".")
            yield released.state_key(module, place, of)
            if last.startswith("layer_norm_") and "self_attention" in module:
                attention = module.rpartition(".")[0]
                yield released.state_key(f"{attention}.core_attention", place, of)


def _longest(model: Model) -> int:
    return int(model.flags["max_position_embeddings"])


def _yaml_of(model: Model, target: Path) -> str:
    flags = {**model.flags, "seq_length": _longest(model)}
    if any((model.folder / name).exists() for name in _TOKENIZERS):
        flags["tokenizer_type"] = "HuggingFaceTokenizer"
        flags["tokenizer_model"] = str((target / MODEL_FILES).resolve())
    return as_yaml(flags, f"{model.family.name}: what training has to know of {model.folder.name}")


def _require_all(
    folder: Path,
    family: Family,
    config: Config,
    tensors: Mapping[str, Tensor],
    plan: Sequence[Piece],
) -> None:
    """Compares the tensors that a configuration means with those that are there."""
    expected = {entry.name: entry.shape for piece in plan for entry in piece.entries}
    missing = [name for name in expected if name not in tensors]
    if missing:
        raise ValueError(
            f"{folder}: found {len(expected) - len(missing):,} of the {len(expected):,} tensors "
            f"that {CONFIG} means, expected also {listed(missing)}: fetch all shards of one "
            "revision"
        )
    known = (*family.derived, *family.left_out(config))
    left = [name for name in sorted(set(tensors) - set(expected)) if not _is_one_of(name, known)]
    if left:
        raise ValueError(
            f"{folder}: found {len(left):,} tensors that no model of {family.name} with this "
            f"{CONFIG} has, expected none: {listed(left)}. They would be lost: this is another "
            "model, or has something added"
        )
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise ValueError(
                f"{tensors[name].path}: found {name} of shape {list(tensors[name].shape)}, "
                f"expected {list(shape)} by {CONFIG}: fetch both of the same revision"
            )
        require_weight(name, tensors[name])


def _is_one_of(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

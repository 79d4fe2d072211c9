"""From a checkpoint of Megatron's, saved on any layout, to Hugging Face's files."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from megatron_hdp.convert.adapters import AdapterReader, MergedReader, record_of, to_peft
from megatron_hdp.convert.families.flags import update
from megatron_hdp.convert.families.registry import family_of, flags_of
from megatron_hdp.convert.families.table import Family, Piece, by_file, pieces
from megatron_hdp.convert.families.vision import (
    Naming,
    has_pictures,
    language_of,
    naming_of,
    with_language,
)
from megatron_hdp.convert.files import hf_folder
from megatron_hdp.convert.files.dist_reader import DistReader
from megatron_hdp.convert.files.hf_folder import CONFIG, SINGLE, listed
from megatron_hdp.convert.files.quantised import without_quantisation
from megatron_hdp.convert.files.safetensors_file import NAMES, Readable, SafetensorsWriter, Stored
from megatron_hdp.convert.files.workplace import require_new, workplace
from megatron_hdp.convert.to_megatron import copy_tensors
from megatron_hdp.data.prepare import progress_bar
from megatron_hdp.encoders.loading import names_in_files
from megatron_hdp.megatron.adapters import ENCODER
from megatron_hdp.megatron.checkpoint import released
from megatron_hdp.megatron.checkpoint.folder import MODEL_FILES, CheckpointFolder
from megatron_hdp.megatron.checkpoint.unpickling import read_list
from megatron_hdp.megatron.checkpoint.verification import inventory

SHARD_BYTES = 5_000_000_000
"""Of a file: what transformers takes."""
_VERSION = 1
_OF_ENCODER = f"{ENCODER}.model."


@dataclass(frozen=True)
class Trained:
    """A checkpoint and the model that it is of."""

    place: Path
    like: Path
    config: dict[str, Any]
    """Of the language model."""
    family: Family
    reader: DistReader | MergedReader
    pieces: list[Piece]
    whole: dict[str, Any]
    """The configuration as it will be written."""
    naming: Naming
    pictures: Mapping[str, Readable]
    """Tensors of what makes rows of pictures: the checkpoint's, or of files where it has none."""

    @classmethod
    def find(
        cls, source: Path, like: Path | None, step: int | None, base: Path | None = None
    ) -> Trained:
        """Looks at a checkpoint and at the files of the model that it began with.

        One of adapters is read with `base`, the folder of the checkpoint that they stand beside.

        Raises:
            ValueError: something is missing, damaged or does not fit; says what.
        """
        place = _checkpoint(source, step)
        like = like or (base or source) / MODEL_FILES
        if not (like / CONFIG).is_file():
            raise ValueError(
                f"{like / CONFIG}: found no such file, expected the model's configuration: give "
                "--like with the folder of the model that training began with"
            )
        written = hf_folder.read_json(like / CONFIG)
        before = without_quantisation(language_of(written))
        family = family_of(before, str(like / CONFIG))
        flags = flags_of(family, before, str(like / CONFIG))
        stored = hf_folder.find_tensors(like) if has_pictures(written) else {}
        naming = naming_of(written, stored)
        config = update(before, flags, released.flags_of(place))
        reader = _reader(place, base)
        pictures = _pictures(place, written, naming, stored, reader)
        stacked = not any(key.startswith("decoder.layers.0.") for key in reader.keys)
        plan = [_with_key(piece, reader) for piece in pieces(family, config, stacked=stacked)]
        _require_all(place, reader, plan)
        saved_in = str(reader.dtype(plan[0].key)).removeprefix("torch.")
        config |= dict.fromkeys(config.keys() & {"dtype", "torch_dtype"}, saved_in)
        whole = with_language(written, config)
        return cls(place, like, config, family, reader, plan, whole, naming, pictures)

    def identity(self) -> str:
        """What decides the content of the files."""
        at = (self.place / ".metadata").stat()
        content = [
            _VERSION,
            type(self.reader).__name__,
            str(self.place.resolve()),
            at.st_size,
            at.st_mtime_ns,
            self.whole,
        ]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def num_bytes(self, piece: Piece) -> int:
        """Of a piece in the files."""
        itemsize: int = self.reader.dtype(piece.key).itemsize
        return math.prod(piece.region) * itemsize


def to_hugging_face(
    source: Path,
    target: Path,
    say: Callable[[str], None],
    *,
    like: Path | None = None,
    step: int | None = None,
    adapters: Literal["separate", "merged"] | None = None,
    base: Path | None = None,
) -> None:
    """Converts a checkpoint.

    Args:
        source: folder of checkpoints, as ``--save`` takes it.
        target: folder of the model, made here.
        say: prints one line.
        like: folder of the model that training began with; by default the one in `source`, or in
            `base`.
        step: whose checkpoint; the latest if not given.
        adapters: of a checkpoint that holds some: as PEFT's files, the default, or merged into the
            weights of `base`.
        base: folder of the checkpoint that adapters were trained beside.

    Raises:
        ValueError: what was found, expected, and the remedy; nothing half-written is at `target`.
        OSError: a file cannot be read or written.
    """
    require_new(target)
    place = _checkpoint(source, step)
    record = record_of(place)
    if record is None and (adapters or base):
        raise ValueError(
            f"{place}: found a whole model, expected adapters beside --adapters and --base: leave "
            "these out"
        )
    if record is not None and adapters != "merged":
        _write_peft(place, record, target, say, like or (base or source) / MODEL_FILES)
        return
    if record is not None and base is None:
        raise ValueError(
            f"{place}: found adapters alone, expected --base DIR with the checkpoint that they "
            "were trained beside (--pretrained-checkpoint of the run)"
        )
    trained = Trained.find(source, like, step, base)
    shards = by_file(trained.pieces, trained.num_bytes, SHARD_BYTES, whole=True)
    total = sum(map(trained.num_bytes, trained.pieces))
    of_pictures = sum(one.num_bytes for one in trained.pictures.values())
    num_shards = len(shards) + bool(of_pictures)
    with workplace(target, trained.identity(), say) as work:
        shard_of: dict[str, str] = {}
        with progress_bar("convert", total) as tell:
            for number, shard in enumerate(shards):
                name = _shard_name(number, num_shards)
                if work.record_of(name) is None:
                    _write_shard(trained, shard, work.folder / name, tell)
                    work.finish(name, True)
                else:
                    tell(sum(map(trained.num_bytes, shard)))
                for piece in shard:
                    in_files = (trained.naming.in_files(one.name) for one in piece.entries)
                    shard_of.update(dict.fromkeys(in_files, name))
        if of_pictures:
            name = _shard_name(len(shards), num_shards)
            copy_tensors(trained.pictures, work.folder / name)
            shard_of |= dict.fromkeys(trained.pictures, name)
        if num_shards > 1:
            hf_folder.write_index(work.folder, shard_of, total + of_pictures)
        hf_folder.carry(trained.like, work.folder, trained.whole)


@dataclass(frozen=True)
class Held:
    """A tensor of a checkpoint."""

    reader: DistReader | MergedReader
    key: str

    @property
    def dtype(self) -> str:
        """The name that files give its type."""
        return NAMES[self.reader.dtype(self.key)]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self.reader.shape(self.key)

    @property
    def num_bytes(self) -> int:
        """Of the whole tensor."""
        itemsize: int = self.reader.dtype(self.key).itemsize
        return math.prod(self.shape) * itemsize

    def read(self) -> torch.Tensor:
        """Reads it."""
        return self.reader.read(self.key, (0,) * len(self.shape), self.shape)


def _pictures(
    place: Path,
    config: dict[str, Any],
    naming: Naming,
    stored: Mapping[str, Stored],
    reader: DistReader | MergedReader,
) -> Mapping[str, Readable]:
    """What makes rows of pictures, by the names of files."""
    of_files = {name: one for name, one in stored.items() if naming.is_of_pictures(name)}
    keys = [key for key in reader.keys if key.startswith(_OF_ENCODER)]
    held = {key.removeprefix(_OF_ENCODER): key for key in keys}
    if not held:
        return of_files
    names = names_in_files(config, of_files)
    if names.keys() != held.keys():
        other = sorted(names.keys() ^ held.keys())
        raise ValueError(
            f"{place}: found an encoder whose tensors differ from those of {CONFIG} in "
            f"{listed(other)}, expected the same: give --like with the folder of the model that "
            "training began with"
        )
    return {names[ours]: Held(reader, key) for ours, key in sorted(held.items())}


def _reader(place: Path, base: Path | None) -> DistReader | MergedReader:
    found = DistReader(place, read_list(place))
    _require_sound(place, found.files.__contains__)
    if base is None:
        return found
    record, at = record_of(place), _checkpoint(base, None)
    assert record is not None
    of_base = DistReader(at, read_list(at))
    _require_sound(at, of_base.files.__contains__)
    return MergedReader(of_base, AdapterReader(place, record))


def _write_peft(
    place: Path, record: dict[str, Any], target: Path, say: Callable[[str], None], like: Path
) -> None:
    if not (like / CONFIG).is_file():
        raise ValueError(
            f"{like / CONFIG}: found no such file, expected the model's configuration: give --like "
            "with the folder of the model that training began with"
        )
    config = without_quantisation(hf_folder.read_json(like / CONFIG))
    to_peft(place, record, target, say, family_of(config, str(like / CONFIG)), config)


def _checkpoint(source: Path, step: int | None) -> Path:
    folder = CheckpointFolder(source)
    place = folder.release() if step is None else None
    if place is None:
        step = folder.latest() if step is None else step
        if step is None:
            raise ValueError(
                f"{source}: found no checkpoint, expected the folder of --save of a run, or of --to"
            )
        place = folder.find(step)
    _require_sound(place, lambda name: not name.endswith(".distcp"))
    return place


def _require_sound(place: Path, checked: Callable[[str], bool]) -> None:
    """Refuses a checkpoint whose files are not what was saved; reads those of these names."""
    files = inventory(place)
    faults = files.outer_faults() or filter(None, map(files.fault_of, filter(checked, files.sizes)))
    if fault := next(iter(faults), None):
        raise ValueError(
            f"{fault}: the checkpoint is damaged, take another one: `megatron-hdp verify "
            f"{place.parent}` says which is good"
        )


def _with_key(piece: Piece, reader: DistReader | MergedReader) -> Piece:
    """The piece under the key that the checkpoint has."""
    held = [key for key in (piece.key, *piece.also) if key in reader.keys]
    return replace(piece, key=held[0]) if held else piece


def _require_all(place: Path, reader: DistReader | MergedReader, plan: Sequence[Piece]) -> None:
    missing = sorted({piece.key for piece in plan} - reader.keys)
    if missing:
        raise ValueError(
            f"{place}: found no {listed(missing)}, expected the tensors of the model in {CONFIG}: "
            "give --like with the folder of the model that training began with"
        )
    used = {key for piece in plan for key in (piece.key, *piece.also)}
    left = [key for key in reader.keys - used if not key.startswith(_OF_ENCODER)]
    left = sorted(key for key in left if "optimizer" not in key)
    if left:
        raise ValueError(
            f"{place}: found tensors that the model in {CONFIG} does not have, expected none: "
            f"{listed(left)}. They would be lost: give --like with the folder of the right model"
        )
    for piece in plan:
        found = reader.shape(piece.key)
        fits = found == piece.shape
        if piece.is_vocabulary:
            fits = found[1:] == piece.shape[1:] and found[0] >= piece.shape[0]
        if not fits:
            raise ValueError(
                f"{place}: found {piece.key} of shape {list(found)}, expected {list(piece.shape)}"
                f"{' or more rows' if piece.is_vocabulary else ''} by {CONFIG}: give --like with "
                "the folder of the model that training began with"
            )


def _shard_name(number: int, of: int) -> str:
    return SINGLE if of == 1 else f"model-{number + 1:05d}-of-{of:05d}.safetensors"


def _write_shard(
    trained: Trained, shard: Sequence[Piece], path: Path, tell: Callable[[int], Any]
) -> None:
    tensors = {
        trained.naming.in_files(entry.name): (trained.reader.dtype(piece.key), entry.shape)
        for piece in shard
        for entry in piece.entries
    }
    with closing(SafetensorsWriter(path, dict(sorted(tensors.items())))) as file:
        for piece in shard:
            _write_piece(trained, piece, file)
            tell(trained.num_bytes(piece))


def _write_piece(trained: Trained, piece: Piece, file: SafetensorsWriter) -> None:
    """A function of its own, so that no tensor outlives it."""
    region = trained.reader.read(piece.key, piece.offsets, piece.lengths).reshape(piece.region)
    tensors = piece.layout.to_hugging_face(region, trained.family.sizes(trained.config))
    for entry, tensor in zip(piece.entries, tensors, strict=True):
        file.write(trained.naming.in_files(entry.name), tensor, entry.part)

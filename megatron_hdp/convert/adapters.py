"""Adapters (LoRA) of a run: into PEFT's files, or added to the weights that they stand beside."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from megatron_hdp.convert.families.layouts import Transposed
from megatron_hdp.convert.families.table import Family, Piece, pieces
from megatron_hdp.convert.files.dist_reader import DistReader, Numbers
from megatron_hdp.convert.files.hf_folder import listed
from megatron_hdp.convert.files.safetensors_file import SafetensorsWriter
from megatron_hdp.convert.files.workplace import require_new, workplace
from megatron_hdp.megatron.adapters import NAMES
from megatron_hdp.megatron.checkpoint.reading import read_common
from megatron_hdp.megatron.checkpoint.unpickling import read_list
from megatron_hdp.megatron.checkpoint.weights import saved_adapters

FILE, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX, _WEIGHT = "base_model.model.", ".weight"


def record_of(place: Path) -> dict[str, Any] | None:
    """What a checkpoint says of its adapters; None where it holds a whole model.

    Raises:
        ValueError: it is damaged.
    """
    return saved_adapters(read_common(place))


class AdapterReader:
    """The adapters of one checkpoint, by the weights that they stand beside."""

    def __init__(self, place: Path, record: dict[str, Any]) -> None:
        self.reader = DistReader(place, read_list(place))
        self.rank = int(record["rank"])
        self.scale = float(record["alpha"]) / self.rank
        self._place = place

    def has(self, key: str) -> bool:
        """Whether a weight has an adapter."""
        return self._keys(key)[1] in self.reader.keys

    def read(
        self, key: str, offsets: Numbers, lengths: Numbers
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A ``[rank, columns]`` and B ``[rows, rank]`` of a region of one weight."""
        of_a, of_b = self._keys(key)
        *front, row, column = offsets
        *ones, rows, columns = lengths
        a = self.reader.read(of_a, (*front, 0, column), (*ones, self.rank, columns))
        b = self.reader.read(of_b, (*front, row, 0), (*ones, rows, self.rank))
        return a.reshape(self.rank, columns), b.reshape(rows, self.rank)

    def require_used(self, keys: Sequence[str]) -> None:
        """Refuses adapters beside none of these weights.

        Raises:
            ValueError: names some.
        """
        used = {name for key in keys for name in self._keys(key)}
        held = {key for key in self.reader.keys if key.rpartition(".")[-1] in NAMES}
        if left := sorted(key for key in held - used if "optimizer" not in key):
            raise ValueError(
                f"{self._place}: found adapters that the model's files have no place for, expected "
                f"none: {listed(left)}. They would be lost: give --like with the folder of the "
                "right model"
            )

    def _keys(self, key: str) -> tuple[str, str]:
        stem = key.removesuffix("weight")
        return stem + NAMES[0], stem + NAMES[1]


class MergedReader:
    """The weights of a base and what adapters add to them, as if one checkpoint held the sums."""

    def __init__(self, base: DistReader, adapters: AdapterReader) -> None:
        self._base, self._adapters = base, adapters
        self.keys, self.files = base.keys, base.files
        self.shape, self.dtype = base.shape, base.dtype
        adapters.require_used([*base.keys])

    def read(self, key: str, offsets: Numbers, lengths: Numbers) -> torch.Tensor:
        """A region of a weight, added up in float64."""
        found = self._base.read(key, offsets, lengths)
        if not self._adapters.has(key):
            return found
        a, b = self._adapters.read(key, offsets, lengths)
        added = self._adapters.scale * (b.double() @ a.double())
        return (found.double() + added.view(found.shape)).to(found.dtype)


def to_peft(
    place: Path,
    record: dict[str, Any],
    target: Path,
    say: Callable[[str], None],
    family: Family,
    config: dict[str, Any],
) -> None:
    """Writes the adapters of a checkpoint as PEFT keeps them.

    Queries, keys and values have one A here, and so have both halves of a gated MLP; there each
    has a copy.

    Args:
        place: the checkpoint.
        record: of its adapters.
        target: folder to make.
        say: prints one line.
        family: of the model.
        config: of the model, as Hugging Face has it.

    Raises:
        ValueError: an adapter of experts that one tensor holds all of, or one that the model has
            no place for; nothing is at `target`.
    """
    require_new(target)
    adapters, sizes = AdapterReader(place, record), family.sizes(config)
    stacked = not any(key.startswith("decoder.layers.0.") for key in adapters.reader.keys)
    plan = [one for one in pieces(family, config, stacked=stacked) if adapters.has(one.key)]
    adapters.require_used([one.key for one in plan])
    tensors: dict[str, torch.Tensor] = {}
    for piece in plan:
        _require_plain(piece, place)
        a, b = adapters.read(piece.key, piece.offsets, piece.lengths)
        for entry, part in zip(piece.entries, piece.layout.to_hugging_face(b, sizes), strict=True):
            name = _PREFIX + entry.name.removesuffix(_WEIGHT)
            tensors[f"{name}.lora_A{_WEIGHT}"] = a
            tensors[f"{name}.lora_B{_WEIGHT}"] = part.contiguous()
    modules = {name.split(".lora_")[0].rpartition(".")[-1] for name in tensors}
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": adapters.rank,
        "lora_alpha": record["alpha"],
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(modules),
        "inference_mode": True,
    }
    with workplace(target, f"{place.resolve()} {settings}", say) as work:
        kinds = {name: (one.dtype, tuple(one.shape)) for name, one in sorted(tensors.items())}
        with closing(SafetensorsWriter(work.folder / FILE, kinds)) as file:
            for name, one in tensors.items():
                file.write(name, one, None)
        (work.folder / CONFIG).write_text(json.dumps(settings, indent=2) + "\n")


def _require_plain(piece: Piece, place: Path) -> None:
    if isinstance(piece.layout, Transposed) or any(one.part is not None for one in piece.entries):
        raise ValueError(
            f"{place}: found adapters of {piece.key}, expected none of experts that one tensor of "
            "transformers holds all of, because PEFT has no files for them: add --adapters merged"
        )

"""The encoder of a model's folder as Hugging Face lays it out, read and written."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from megatron_hdp.convert.files.hf_folder import (
    CONFIG,
    SINGLE,
    carry,
    find_tensors,
    listed,
    read_json,
)
from megatron_hdp.convert.files.safetensors_file import SafetensorsWriter
from megatron_hdp.convert.files.workplace import require_new
from megatron_hdp.encoders.base import ItemEncoder, PatchEncoder, Pixels
from megatron_hdp.encoders.llava import LlavaEncoder
from megatron_hdp.encoders.qwen2_5_vl import Qwen25VLEncoder
from megatron_hdp.encoders.qwen2_audio import Qwen2AudioEncoder
from megatron_hdp.encoders.qwen3_vl import Qwen3VLEncoder
from megatron_hdp.media import ItemCostModel

ENCODERS: dict[str, type[ItemEncoder]] = {
    "llava": LlavaEncoder,
    "qwen2_audio": Qwen2AudioEncoder,
    "qwen2_5_vl": Qwen25VLEncoder,
    "qwen3_vl": Qwen3VLEncoder,
    "qwen3_vl_moe": Qwen3VLEncoder,
}
"""By the ``model_type`` of a configuration."""
_PROCESSOR = "preprocessor_config.json"


def load_encoder(
    folder: str | os.PathLike[str], *, dtype: torch.dtype | None = None, **settings: Any
) -> ItemEncoder:
    """The encoder of a model, with its weights.

    Args:
        folder: with config.json and safetensors; preprocessor_config.json says how bytes become
            numbers, where it is there.
        dtype: of the weights; by default the files'.
        settings: as of `described_encoder`.

    Raises:
        ValueError: of a folder that holds no such model, or not all of the encoder.
    """
    path, encoder = Path(folder), described_encoder(folder, **settings)
    stored = find_tensors(path)
    named = {ours: stored[name] for name in stored if (ours := _own_name(type(encoder), name))}
    if isinstance(encoder, PatchEncoder):
        encoder.pixels = _pixels_of(path) or encoder.pixels
    expected = encoder.state_dict()
    _require_names(path, list(named), list(expected))
    weights = {name: named[name].read() for name in expected}
    for name, weight in weights.items():
        if weight.shape != expected[name].shape:
            raise ValueError(
                f"{path}: found {name} of shape {list(weight.shape)}, expected "
                f"{list(expected[name].shape)} by its {CONFIG}"
            )
    encoder.load_state_dict(weights, assign=True)
    return encoder if dtype is None else encoder.to(dtype=dtype)


def described_encoder(
    folder: str | os.PathLike[str], *, costs: str | os.PathLike[str] | None = None, **settings: Any
) -> ItemEncoder:
    """The encoder of a model on PyTorch's meta device: shapes without numbers.

    Args:
        folder: with config.json; no weights are read.
        costs: a file of what its items cost, as of `ItemCostModel.from_json`.
        settings: of the encoder's class: ``patches_per_pack``.

    Raises:
        ValueError: of a folder that holds no such model, or a file that holds no costs.
    """
    path = Path(folder)
    config = read_json(path / CONFIG)
    kind = config.get("model_type")
    if kind not in ENCODERS:
        raise ValueError(
            f"{path / CONFIG}: found model_type {kind!r}, expected one of {', '.join(ENCODERS)}: "
            "encoders of other models are not known; attach_encoder takes any module"
        )
    with torch.device("meta"):
        found = ENCODERS[kind](config, **settings)
    found.measured = None if costs is None else ItemCostModel.from_json(costs)
    return found


def save_encoder(
    encoder: ItemEncoder, folder: str | os.PathLike[str], *, like: str | os.PathLike[str]
) -> None:
    """Writes an encoder where `load_encoder` reads it, and ``megatron-hdp convert --like``.

    One rank is to call it.

    Args:
        encoder: trained or not.
        folder: made here.
        like: the folder that the encoder came from: configuration, tokenizer, names of tensors.

    Raises:
        ValueError: there is something at `folder`, or `like` is of another model.
    """
    source, target = Path(like), Path(folder)
    require_new(target)
    names = {_own_name(type(encoder), name): name for name in find_tensors(source)}
    names.pop(None, None)
    weights = encoder.state_dict()
    _require_names(source, [*map(str, names)], list(weights))
    tensors = {names[ours]: tensor.detach().cpu() for ours, tensor in weights.items()}
    carry(source, target, read_json(source / CONFIG))
    told = {name: (one.dtype, tuple(one.shape)) for name, one in sorted(tensors.items())}
    with closing(SafetensorsWriter(target / SINGLE, told)) as file:
        for name in told:
            file.write(name, tensors[name])


def names_in_files(config: Mapping[str, Any], tensors: Iterable[str]) -> dict[str, str]:
    """Of tensors of a model's files those of its encoder, by their names in it.

    Raises:
        ValueError: no encoder of such a model is known.
    """
    kind = config.get("model_type")
    if kind not in ENCODERS:
        raise ValueError(
            f"found model_type {kind!r} and a trained encoder, expected one of "
            f"{', '.join(ENCODERS)}: give --like with the folder of the model"
        )
    named = {_own_name(ENCODERS[kind], name): name for name in tensors}
    return {ours: theirs for ours, theirs in named.items() if ours is not None}


def _own_name(encoder: type[ItemEncoder], name: str) -> str | None:
    """What a tensor of a file is called in the encoder; None: it is not of it."""
    for theirs, ours in encoder.prefixes.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return None


def _pixels_of(folder: Path) -> Pixels | None:
    if not (folder / _PROCESSOR).exists():
        return None
    found: Mapping[str, Any] = read_json(folder / _PROCESSOR)
    if "image_mean" not in found or "image_std" not in found:
        return None
    scale = found.get("rescale_factor", 1 / 255)
    return Pixels(tuple(found["image_mean"]), tuple(found["image_std"]), scale)


def _require_names(folder: Path, found: list[str], expected: list[str]) -> None:
    missing = sorted(set(expected) - set(found))
    more = sorted(set(found) - set(expected))
    if missing or more:
        which = f"no {listed(missing)}" if missing else f"also {listed(more)}"
        raise ValueError(
            f"{folder}: found {which} among the encoder's {len(found)} tensors, expected the "
            f"{len(expected)} of its {CONFIG}: fetch both of the same revision"
        )

"""Weights of 8 and 4 bits become bfloat16 as they are read: FP8 of DeepSeek, MXFP4 of gpt-oss.

w, w_scale_inv          FP8, and a factor for each block of 128 x 128 values
w_blocks, w_scales      two values of 4 bits in a byte, and an exponent for each 32 values
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from megatron_hdp.convert.files.safetensors_file import FLOATING, Stored

KEY = "quantization_config"
_FP8, _MXFP4 = "fp8", "mxfp4"
_FP8_SCALES, _BLOCKS, _SCALES = "_scale_inv", "_blocks", "_scales"
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of 4 bits, the first of which is the sign."""
_EXPONENT_BIAS = 127


@dataclass(frozen=True)
class _Made:
    values: Stored
    scales: Stored
    shape: tuple[int, ...]

    @property
    def path(self) -> Path:
        return self.values.path

    @property
    def num_bytes(self) -> int:
        itemsize: int = torch.bfloat16.itemsize
        return prod(self.shape) * itemsize


@dataclass(frozen=True)
class Fp8(_Made):
    """A matrix of FP8."""

    block: tuple[int, int]

    def read(self, part: int | None = None) -> torch.Tensor:
        """In bfloat16, a row of blocks at a time."""
        assert part is None
        values, scales = self.values.read(), self.scales.read()
        whole = torch.empty(self.shape, dtype=torch.bfloat16)
        height, width = self.block
        for number, factors in enumerate(scales):
            rows = slice(number * height, (number + 1) * height)
            by_column = factors.repeat_interleave(width)[: self.shape[1]]
            whole[rows] = values[rows].float() * by_column
        return whole


@dataclass(frozen=True)
class Mxfp4(_Made):
    """The matrices of all experts; what is packed are the columns of each."""

    def read(self, part: int | None = None) -> torch.Tensor:
        """In bfloat16."""
        if part is None:
            return torch.stack([self.read(one) for one in range(self.shape[0])])
        packed, exponents = self.values.read(part), self.scales.read(part)
        signed = (*_VALUES, *(-value for value in _VALUES))
        table = torch.tensor(signed, dtype=torch.bfloat16)
        whole = torch.empty((*packed.shape, 2), dtype=torch.bfloat16)
        for row, (of_row, exponent) in enumerate(zip(packed, exponents, strict=True)):
            both = torch.stack((of_row & 0xF, of_row >> 4), dim=-1).int()
            by_block = exponent.int()[:, None, None] - _EXPONENT_BIAS
            whole[row] = torch.ldexp(table[both], by_block)
        return whole.flatten(1).t()


Tensor = Stored | Fp8 | Mxfp4
"""A tensor in files, or one made of some; all have a path, a shape and a size, and are read."""


def without_quantisation(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of the same model in bfloat16.

    Raises:
        ValueError: a quantisation that is not known here.
    """
    plain = {key: value for key, value in config.items() if key != KEY}
    if method := _method(config):
        if method not in (_FP8, _MXFP4):
            raise ValueError(
                f"found weights quantised by {method}, expected {_FP8}, {_MXFP4} or none: save the "
                "model in bfloat16 with transformers first"
            )
        for key in ("dtype", "torch_dtype"):
            if key in plain:
                plain[key] = "bfloat16"
    return plain


def as_read(config: Mapping[str, Any], tensors: Mapping[str, Stored]) -> dict[str, Tensor]:
    """The tensors of a model by name, those that are quantised in bfloat16.

    Raises:
        ValueError: scales are missing.
    """
    method = _method(config)
    if method == _FP8:
        height, width = config[KEY].get("weight_block_size") or (0, 0)
        return dict(_of_fp8(tensors, (height, width)))
    return dict(_of_mxfp4(tensors)) if method == _MXFP4 else dict(tensors)


def _method(config: Mapping[str, Any]) -> str | None:
    found = config.get(KEY)
    return None if not found else str(found.get("quant_method"))


def _of_fp8(tensors: Mapping[str, Stored], block: tuple[int, int]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, stored in tensors.items():
        if name.endswith(_FP8_SCALES):
            continue
        if stored.dtype != "F8_E4M3":
            found[name] = stored
            continue
        scales = _scales(tensors, name, name + _FP8_SCALES)
        if not all(block) or scales.shape != tuple(
            -(-size // of) for size, of in zip(stored.shape, block, strict=True)
        ):
            raise ValueError(
                f"{stored.path}: found scales of shape {list(scales.shape)} for {name} "
                f"{list(stored.shape)}, expected one for each block of weight_block_size "
                f"{list(block)}: save the model in bfloat16 with transformers first"
            )
        _require_types(tensors, FLOATING, name + _FP8_SCALES)
        found[name] = Fp8(stored, scales, stored.shape, block)
    return found


def _of_mxfp4(tensors: Mapping[str, Stored]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, stored in tensors.items():
        if name.endswith(_BLOCKS):
            whole = name.removesuffix(_BLOCKS)
            scales = _scales(tensors, name, whole + _SCALES)
            _require_types(tensors, ("U8",), name, whole + _SCALES)
            experts, rows, blocks, pairs = stored.shape
            found[whole] = Mxfp4(stored, scales, (experts, 2 * blocks * pairs, rows))
        elif not name.endswith(_SCALES):
            found[name] = stored
    return found


def require_weight(name: str, tensor: Tensor) -> None:
    """Refuses a tensor whose numbers are not yet what they stand for.

    Raises:
        ValueError: it is of no floating type, or of one of 8 bits without scales.
    """
    if isinstance(tensor, Stored) and tensor.dtype not in FLOATING:
        raise ValueError(
            f"{tensor.path}: found {name} of type {tensor.dtype}, expected a weight of "
            f"{', '.join(FLOATING)}, or one that {KEY} in config.json describes as {_FP8} or "
            f"{_MXFP4}: save the model in bfloat16 with transformers first"
        )


def _require_types(tensors: Mapping[str, Stored], types: Collection[str], *names: str) -> None:
    for name in names:
        if tensors[name].dtype not in types:
            raise ValueError(
                f"{tensors[name].path}: found {name} of type {tensors[name].dtype}, expected "
                f"{' or '.join(types)}: fetch the model again"
            )


def _scales(tensors: Mapping[str, Stored], name: str, of: str) -> Stored:
    if of not in tensors:
        raise ValueError(
            f"{tensors[name].path}: found {name} without {of}, expected its scales: fetch all "
            "shards of one revision"
        )
    return tensors[of]

"""Seconds of an item on a rank, from a few coefficients."""

import math
import os
from dataclasses import asdict, dataclass, fields, replace
from typing import Self

import orjson

from megatron_hdp.media.encoders import Encoder
from megatron_hdp.planner.json_fields import read_fields

_VALUE_BYTES = 2
_TRAINED, _FROZEN = 4, 1  # forward without a graph, forward again, and backward, twice a forward
# What members of a cut item send, in keys and values: two forwards, and gradients in backward.
_GATHERS = 4


@dataclass(frozen=True, kw_only=True)
class ItemCostModel:
    """An item of n patches takes ``patch_s n + patch2_s n^2`` seconds on a rank of speed 1.

    It attends to nothing but itself, so packing items adds no more than ``pack_s`` for each call.
    Cut over D ranks of a node each computes its share of both terms, while keys and values of the
    n (D - 1) / D patches of the others come around a ring, in ``gathered_s_per_patch`` for each;
    D - 1 of D steps of attention hide them, what is left is waited for.
    """

    patch_s: float
    patch2_s: float = 0.0
    pack_s: float = 0.0
    gathered_s_per_patch: float = 0.0
    forward_share: float = 1 / _TRAINED
    """Of all this the part before the rows are there; the rest is behind their gradients."""

    def __post_init__(self) -> None:
        """Refuses what is no cost.

        Raises:
            ValueError: names the field.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"{field.name} of an item: found {value}, expected a number from 0 on"
                )
        if not 0 < self.forward_share <= 1:
            raise ValueError(
                f"forward_share of an item: found {self.forward_share}, expected above 0, at most 1"
            )
        if not self.patch_s + self.patch2_s:
            raise ValueError("an item: found no cost of a patch, expected one above 0")

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `to_json` wrote.

        Raises:
            ValueError: the file holds no such cost; names the key.
        """
        data = read_fields(cls, path, "item costs")
        if "patch_s" not in data:
            raise ValueError(f"item costs {path}: key 'patch_s' is missing; add it")
        wrong = [name for name, one in data.items() if not isinstance(one, int | float)]
        if wrong:
            raise ValueError(
                f"item costs {path}: {wrong[0]}: found {data[wrong[0]]!r}, expected seconds"
            )
        try:
            return cls(**data)
        except ValueError as error:
            raise ValueError(f"item costs {path}: {error}") from error

    def to_json(self) -> bytes:
        """Return the JSON object that `from_json` reads."""
        return orjson.dumps(asdict(self), option=orjson.OPT_INDENT_2)

    def frozen(self) -> Self:
        """Return the cost of an encoder that learns nothing: the first forward alone."""
        share = self.forward_share
        return replace(
            self,
            patch_s=share * self.patch_s,
            patch2_s=share * self.patch2_s,
            pack_s=share * self.pack_s,
            gathered_s_per_patch=share * self.gathered_s_per_patch,
            forward_share=1.0,
        )

    @classmethod
    def from_encoder(
        cls,
        encoder: Encoder,
        *,
        flop_per_s: float = 400e12,
        is_trained: bool = True,
        pack_s: float = 0.0,
        bytes_per_s: float = 300e9,
    ) -> Self:
        """Return the cost by an encoder's shape.

        Args:
            encoder: whose FLOP are counted.
            flop_per_s: of a rank.
            is_trained: whether each item is encoded twice and differentiated, or encoded once.
            pack_s: seconds of a call whatever it holds.
            bytes_per_s: that a rank sends to another one of its node.
        """
        linear, quadratic = encoder.flop()
        passes = _TRAINED if is_trained else _FROZEN
        gathers = _GATHERS if is_trained else 1
        kv_bytes = encoder.gathered_bytes(_VALUE_BYTES)
        return cls(
            patch_s=passes * linear / flop_per_s,
            patch2_s=passes * quadratic / flop_per_s,
            pack_s=pack_s,
            gathered_s_per_patch=gathers * kv_bytes / bytes_per_s,
            forward_share=1 / passes,
        )

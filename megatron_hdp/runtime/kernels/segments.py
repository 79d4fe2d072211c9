"""Lengths of packed segments, on the host and, as CUDA kernels want them, on the device."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import torch

from megatron_hdp.runtime.host_to_device import to_device

_SMALLEST_PACK = 8

Gradients: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Of queries, keys and values."""


@dataclass(frozen=True, eq=False)
class Segments:
    """Segments that lie one behind another in a packed tensor.

    Made once for a micro-batch and read in every layer, so that no layer copies lengths to the
    device or waits for it.
    """

    lengths: tuple[int, ...]
    """Tokens of each segment."""
    offsets: torch.Tensor
    """int32 ``[segments + 1]``: where each begins, and where the last one ends (`cu_seqlens`)."""
    bucketed_offsets: torch.Tensor
    """int32: `offsets` and behind them empty segments, as many as make up `bucket`. For a library
    that plans anew for every number of segments."""
    longest: int
    """Tokens of the longest segment."""

    @classmethod
    def of(cls, lengths: tuple[int, ...], device: torch.device) -> Segments:
        """Segments of these lengths; their offsets reach a GPU without the host waiting for it."""
        ends = [0, *accumulate(lengths)]
        empty = [ends[-1]] * (bucket(len(lengths)) - len(lengths))
        bucketed = to_device(torch.tensor(ends + empty, dtype=torch.int32), device)
        return cls(lengths, bucketed[: len(ends)], bucketed, max(lengths, default=0))


@dataclass(frozen=True, eq=False)
class Block:
    """Which keys each query of a block sees: those of its segment, or the latest of them."""

    q_segments: Segments
    k_segments: Segments
    """As many; equal where `causal` without a window, with one at least as long."""
    causal: bool
    """Whether the last query of a segment sees its last key, and each one before sees one less."""
    window: int | None = None
    """With `causal`: how many keys a query sees, the last of them its own."""


class Forward(NamedTuple):
    """Inputs of attention, and its results over *all* blocks, as their backward wants them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


def bucket(num_segments: int) -> int:
    """The number of segments, rounded up to 1, 8, 16, 32, 64 and so on.

    A single one stays alone: most rings have one sequence, and empty segments beside it would be
    all that is saved.
    """
    if num_segments <= 1:
        return num_segments
    return int(max(_SMALLEST_PACK, 1 << (num_segments - 1).bit_length()))


def longest_class(longest: int) -> int:
    """The longest length, rounded up to 64, 128, 256 and so on: a library may plan for each."""
    return max(64, 1 << (longest - 1).bit_length())

"""Lengths of packed segments, on the host and, as CUDA kernels want them, on the device."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch


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
    longest: int
    """Tokens of the longest segment."""

    @classmethod
    def of(cls, lengths: tuple[int, ...], device: torch.device) -> Segments:
        """Segments of these lengths; their offsets reach a GPU without the host waiting for it."""
        offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        if device.type == "cuda":
            offsets = offsets.pin_memory().to(device, non_blocking=True)
        return cls(lengths, offsets, max(lengths, default=0))

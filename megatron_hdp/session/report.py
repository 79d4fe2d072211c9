"""What a step of a session did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_hdp.planner import Plan


@dataclass(frozen=True, kw_only=True)
class SessionReport:
    """A step over all ranks; the same on each."""

    loss: float
    """Sum over the tokens with loss of the global batch, divided by `divisor`."""
    divisor: float
    sums: Mapping[str, float]
    """Figures that a loss of the caller's returned, summed over the same tokens, not divided."""
    sequences: int
    tokens: int
    loss_tokens: int
    """Tokens with loss."""
    plan: Plan
    """What ran."""
    makespan_s: float
    """Seconds from the start of the step until the last rank reached gradient sync."""
    ring_bytes: int
    """Bytes that all ranks sent around rings, forward and backward."""
    offloaded_bytes: int
    """Bytes of activations, of all ranks, that waited in host memory."""

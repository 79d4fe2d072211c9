"""What a step did, for logs: the same on every rank, with or without HDP."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepReport:
    """One step over all ranks."""

    loss: float
    """Mean over the global batch's loss tokens."""
    tokens: int
    """Tokens of the global batch, padding not counted."""
    loss_tokens: int
    """Tokens of the global batch that carry loss."""
    sequences: int
    consumed_after: int
    """Sequences drawn up to and including this step; where the next step begins."""
    micro_batches_min: int
    """Least number of micro-batches on a rank."""
    micro_batches_max: int
    planned_efficiency: float | None = None
    """What the plan promises: (total compute time / ranks) / makespan."""
    measured_efficiency: float | None = None
    """The same from clocks: (time not spent waiting for ring members / ranks) / makespan."""
    ring_bytes: int = 0
    """Bytes that all ranks sent around rings."""
    planning_ms: float = 0.0
    non_finite: tuple[str, ...] = ()
    """Micro-batches of any rank whose loss is NaN or infinite, in words."""

"""What a step did, for logs: the same on every rank, with or without HDP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """Figures of one step over all ranks; those of HDP are None without it."""

    loss: float
    """Mean over the global batch's loss tokens."""
    tokens: int
    """Tokens of the global batch, padding not counted: the sum of its sequences' lengths."""
    loss_tokens: int
    """Tokens of the global batch that carry loss."""
    sequences: int
    planned_efficiency: float | None = None
    """What the plan promises: (total compute time / ranks) / makespan."""
    measured_efficiency: float | None = None
    """The same from clocks: (time not spent waiting for others / ranks) / makespan."""
    makespan_s: float | None = None
    """From the start of the step until the last rank reached gradient sync."""
    idle_share_max: float | None = None
    """Share of the makespan in which the idlest rank waited for others or was done."""
    idle_share_mean: float | None = None
    """Mean of it over ranks: 1 - measured efficiency."""
    ring_wait_s: float | None = None
    """Seconds waiting for ring members, mean over ranks."""
    pipeline_wait_s: float | None = None
    """Seconds waiting for other pipeline stages, mean over ranks."""
    sync_s: float | None = None
    """Seconds of gradient sync, waiting for the last rank included, mean over ranks."""
    ring_bytes: int | None = None
    """Bytes that all ranks sent around rings."""
    offloaded_bytes: int | None = None
    """Activations that waited in host memory, over all ranks."""
    host_bytes_max: int | None = None
    """Host memory that a rank holds for them, at most."""
    planning_ms: float | None = None
    """The planner's own time."""
    planning_exposed_ms: float | None = None
    """Time that the slowest rank waited for planning and reading; the rest was hidden."""
    skipped_documents: int | None = None
    """Corrupt documents skipped since the start of the run."""
    planner_failures: int | None = None
    """Steps since the start of the run that fell back to the static plan."""
    micro_batches_min: int | None = None
    """Least number of micro-batches on a rank."""
    micro_batches_max: int | None = None


@dataclass(frozen=True, kw_only=True)
class StepReport(StepFigures):
    """What a step gives to the loop: its figures, and what follows from it."""

    squared_tokens: int
    """Sum of the squares of its sequences' lengths."""
    consumed_after: int
    """Sequences drawn up to and including this step; where the next step begins."""
    non_finite: tuple[str, ...] = ()
    """Micro-batches of any rank whose loss is NaN or infinite, in words."""


def over_all_ranks(
    sums: Mapping[str, float], maxima: Mapping[str, float], device: torch.device
) -> dict[str, float]:
    """Sums and maxima over all ranks of the job, each by its name, in two small all-reduces.

    Args:
        sums: this rank's part of each sum; the same names in the same order on every rank.
        maxima: what to take the greatest of, likewise.
        device: where the backend wants its tensors.
    """
    found: dict[str, float] = {}
    for part, operation in ((sums, dist.ReduceOp.SUM), (maxima, dist.ReduceOp.MAX)):
        values = torch.tensor(list(part.values()), dtype=torch.float64, device=device)
        dist.all_reduce(values, operation)
        found.update(zip(part, values.tolist(), strict=True))
    return found

"""What a step did, for logs: the same on every rank, with or without HDP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np
import torch
import torch.distributed as dist

from megatron_hdp.data.mixture import Position
from megatron_hdp.data.steps import RankStep
from megatron_hdp.megatron.parallel import RankPlace, compute_device


@dataclass(frozen=True, kw_only=True)
class SourceFigures:
    """Figures of one source of the data in one step, over all ranks."""

    tokens: int
    """Tokens of the step that are its; padding and corrupt documents are not counted."""
    loss_tokens: int
    """Those of them that carry loss."""
    loss: float | None
    """Nats: mean over its loss tokens; None where it has none in this step."""
    share: float
    """Of all that was drawn since the start of training, in the unit of the weights."""
    epoch: int
    """The pass over the source in which the step began, from 0."""
    bad: int
    """Bad documents: left out when it was prepared, or skipped since this process began."""


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """Figures of one step over all ranks; those of HDP are None without it."""

    loss: float
    """Nats: mean over the loss tokens of the global batch."""
    tokens: int
    """Tokens of the global batch; padding and corrupt documents are not counted."""
    loss_tokens: int
    """Those of them that carry loss."""
    sequences: int
    """Sequences of the global batch."""
    planned_efficiency: float | None = None
    """What the plan promises: total compute / ranks / makespan."""
    measured_efficiency: float | None = None
    """The same by clocks: mean time not spent waiting for others / makespan."""
    makespan_s: float | None = None
    """Seconds from the start of the step until the last rank reaches gradient sync."""
    idle_share_max: float | None = None
    """Share of the makespan in which the idlest rank waited for others or was done."""
    idle_share_mean: float | None = None
    """Mean of it over ranks: 1 - ``measured_efficiency``."""
    ring_wait_s: float | None = None
    """Seconds waiting for ring members, mean over ranks."""
    pipeline_wait_s: float | None = None
    """Seconds waiting for other pipeline stages, mean over ranks."""
    sync_s: float | None = None
    """Seconds of gradient sync, waiting for the last rank included, mean over ranks."""
    ring_bytes: int | None = None
    """Bytes that all ranks sent around rings, forward and backward."""
    offloaded_bytes: int | None = None
    """Bytes of activations, of all ranks, that waited in host memory."""
    host_bytes_max: int | None = None
    """Bytes of host memory held for them by the rank that holds the most."""
    planning_ms: float | None = None
    """Milliseconds: the planner's own time."""
    planning_exposed_ms: float | None = None
    """Milliseconds that the slowest rank waited for planning and reading; the rest was hidden
    behind the step before."""
    data_wait_ms: float | None = None
    """Milliseconds that the slowest rank waited for its data, planning included."""
    loaders: int | None = None
    """Loaders of all sources in the data plane, those that stand by included; None without one."""
    steps_ahead: int | None = None
    """Steps that lay ready behind this one on the node that had the fewest; likewise."""
    skipped_documents: int | None = None
    """Corrupt documents skipped since the start of the run."""
    planner_failures: int | None = None
    """Steps since the start of the run that fell back to the static plan."""
    micro_batches_min: int | None = None
    """Micro-batches of the rank that ran the fewest."""
    micro_batches_max: int | None = None
    """Micro-batches of the rank that ran the most."""
    num_positions: int | None = None
    """Places in the longest list of a rank, padding included."""
    padding_share: float | None = None
    """Share of the places in all ranks' lists in which they ran padding."""
    all_to_all_bytes: int | None = None
    """Bytes that all ranks sent to other ranks' experts and back, forward and backward, if experts
    get equally many tokens; None where every rank has all of them."""
    slow_ranks: int | None = None
    """HDP ranks that were found to run below full speed; None where costs are not learnt."""
    slowest_rank_speed: float | None = None
    """Speed of the slowest HDP rank as it was found, 1 being full speed; likewise."""
    cost_model_changes: int | None = None
    """Changes of the cost model and of speeds since the start of the run; likewise."""
    cost_model_error: float | None = None
    """Middle error of the cost model, over HDP ranks, of what they computed; likewise."""
    mtp_loss: float | None = None
    """Nats: mean loss of tokens behind the next one, the mean over depths; None where there are
    none."""
    sources: Mapping[str, SourceFigures] | None = None
    """Figures of each source of the data."""

    def scalars(self) -> dict[str, float]:
        """Each figure that there is as one number by its name, those of sources by theirs, too."""
        found = {item.name: getattr(self, item.name) for item in fields(self)}
        for key in [key for key, value in found.items() if isinstance(value, Mapping)]:
            for name, figures in found.pop(key).items():
                ours = asdict(figures) if isinstance(figures, SourceFigures) else {"loss": figures}
                found |= {f"{key}/{name}/{what}": value for what, value in ours.items()}
        return {name: value for name, value in found.items() if isinstance(value, int | float)}

    def tagged(self) -> dict[str, float]:
        """The same under the tags of TensorBoard and W&B: ``grad-norm``, ``sources/web_1/loss``."""
        return {
            name if "/" in name else name.replace("_", "-"): value
            for name, value in self.scalars().items()
        }


@dataclass(frozen=True, kw_only=True)
class StepReport(StepFigures):
    """What a step gives to the loop: its figures, and what follows from it."""

    squared_tokens: int
    """Sum of the squares of its sequences' lengths."""
    seen_in_window: int
    """The same of layers with a window: twice the pairs of query and key within it."""
    position_after: Position
    """Where in the data the next step begins."""
    non_finite: tuple[str, ...] = ()
    """Micro-batches of any rank whose loss is NaN or infinite, in words."""


def words_by_source(sources: Mapping[str, SourceFigures]) -> str:
    """Loss and share of each source, for a line of the log."""
    return ", ".join(
        f"{name} {'-' if one.loss is None else f'{one.loss:.4f}'} ({one.share:.3f})"
        for name, one in sources.items()
    )


@dataclass(frozen=True)
class EvaluationLoss:
    """Mean losses over the batches of an evaluation, in nats."""

    loss: float
    sources: Mapping[str, float]
    """By source, of those that had loss tokens."""

    @classmethod
    def of(cls, reports: Sequence[StepReport]) -> EvaluationLoss:
        """That of all batches together."""
        tokens = sum(one.loss_tokens for one in reports)
        loss = sum(one.loss * one.loss_tokens for one in reports) / max(tokens, 1)
        found: dict[str, list[SourceFigures]] = {}
        for report in reports:
            for name, figures in (report.sources or {}).items():
                found.setdefault(name, []).append(figures)
        sources = {}
        for name, parts in found.items():
            if counted := sum(one.loss_tokens for one in parts):
                sources[name] = sum((one.loss or 0.0) * one.loss_tokens for one in parts) / counted
        return cls(loss, sources)


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


class FurtherLosses:
    """What losses of tokens behind the next one weigh in the steps of a split, and what they were.

    Args:
        depths: tokens behind the label that are predicted; 0: none are.
        factor: weight of the mean of their losses.
        place: of this rank.
    """

    def __init__(self, depths: int, factor: float, place: RankPlace) -> None:
        self.depths = depths
        self._factor = factor
        self._place = place

    def weights(self, step: RankStep, loss_tokens: int) -> tuple[float, ...]:
        """What each depth's sum weighs, so that its mean counts as the factor says.

        All sums are divided by `loss_tokens` of the global batch at the end. Every rank must call
        this, its corrupt documents dropped.
        """
        if not self.depths:
            return ()
        counts = np.zeros(self.depths)
        if self._place.is_last_stage and self._place.tensor_rank == 0:
            for one in step.micro_batches:
                counts += one.further_mask.reshape(self.depths, -1).sum(axis=1)
        sums = {str(depth): float(count) for depth, count in enumerate(counts)}
        share = self._factor / self.depths
        over_job = over_all_ranks(sums, {}, compute_device())
        return tuple(share * loss_tokens / max(over_job[name], 1.0) for name in sums)

    def mean(self, total: float, loss_tokens: int) -> float | None:
        """The mean over depths of their mean losses, of all ranks' weighted sums."""
        if not self.depths or not self._factor:
            return None
        return total / self._place.num_tensor_ranks / (self._factor * max(loss_tokens, 1))

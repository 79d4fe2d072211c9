"""Figures of a step, the same on every rank: metrics, log lines, tags and docs come from here.

A field of `StepFigures` is the one declaration of a figure: its name, with the unit at the end, is
the key in ``--metrics-path`` and, dashed, the tag in TensorBoard and W&B; the docstring below it is
its row of the Reference; `figure` says how a log line shows it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_hdp.data.mixture import Corpus, Position
from megatron_hdp.data.steps import Amounts, RankMicroBatch, StepTotals
from megatron_hdp.megatron.parallel import RankPlace, compute_device
from megatron_hdp.runtime.host_to_device import numbers_to_device
from megatron_hdp.runtime.loss import RewardFigures


@dataclass(frozen=True)
class LogLabel:
    """How a log line shows a figure: its name with the unit, then its value.

    The value is written in a format, times a factor to the line's unit, or by a function of all
    figures. The line leaves out a figure that is None, a zero that it hides, and empty words.
    """

    text: str
    form: str | Callable[[Any], str] = ".3f"
    scale: float = 1
    hides_zero: bool = False

    def part(self, value: Any, figures: StepFigures) -> str | None:
        """The part of the line for a value among all figures of its step; None: there is none."""
        if value is None or self.hides_zero and not value:
            return None
        if not isinstance(self.form, str):
            words = self.form(figures)
        else:
            words = f"{value if self.scale == 1 else value * self.scale:{self.form}}"
        return f"{self.text}: {words}" if words else None


def figure(
    label: str, form: str | Callable[[Any], str] = ".3f", *, default: Any = None, **more: Any
) -> Any:
    """Declare a figure that log lines show: see `LogLabel`; without a default it is required."""
    return field(default=default, metadata={"log": LogLabel(label, form, **more)})


@dataclass(frozen=True, kw_only=True)
class SourceFigures:
    """Figures of one source of the data in one step, over all ranks."""

    tokens: int
    """Tokens of the step from this source, without padding and corrupt documents."""
    loss_tokens: int
    """Those of them that carry loss."""
    loss: float | None
    """Nats: mean over its loss tokens; None if it has none in this step."""
    share: float
    """Its share of all data drawn since the start of training, in the unit of the weights."""
    epoch: int
    """The pass over the source in which the step began, from 0."""
    bad: int
    """Bad documents: dropped by preparation, or skipped since this process began."""
    pairs: int | None = None
    """Its pairs, or answers under ``kto``, by which ``loss`` is a mean; None without
    ``--hdp-objective``."""


def words_by_source(sources: Mapping[str, SourceFigures]) -> str:
    """Loss and share of each source, for a log line."""
    return ", ".join(
        f"{name} {'-' if one.loss is None else f'{one.loss:.4f}'} ({one.share:.3f})"
        for name, one in sources.items()
    )


def _sources_in_log(figures: StepFigures) -> str:
    """Nothing where there is one source: its loss is the step's."""
    sources = figures.sources or {}
    return words_by_source(sources) if len(sources) > 1 else ""


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """Figures of one step over all ranks; those of HDP are None without it."""

    loss: float = figure("lm loss", ".6E", default=MISSING)
    """Nats: mean over the loss tokens of the global batch; with ``--hdp-objective`` that loss, mean
    over pairs."""
    chosen_reward: float | None = figure("chosen reward", ".4f")
    """Mean reward of chosen, or desirable, answers: beta times the sum of log-probabilities less
    the reference's, as the objective has it; None without ``--hdp-objective`` and where there are
    none."""
    rejected_reward: float | None = figure("rejected reward", ".4f")
    """The same of rejected, or undesirable, ones."""
    reward_margin: float | None = figure("margin", ".4f")
    """``chosen_reward`` less ``rejected_reward``."""
    reward_accuracy: float | None = figure("accuracy")
    """Share of pairs whose chosen answer has the higher reward; None under ``kto``, too."""
    kto_divergence: float | None = figure("divergence", ".4f")
    """Nats, at least 0: what ``kto`` measured against, a mean over the step's answers, each behind
    another row's prompt; None where there is none."""
    pairs: int | None = figure("pairs", ",")
    """Pairs, or answers under ``kto``, that were trained; None without ``--hdp-objective``."""
    media_items: int | None = figure("items", ",")
    """Items of the step that were encoded; None of a step without any."""
    media_rows: int | None = figure("rows", ",")
    """Tokens of the step that they stand for; likewise."""
    encoder_efficiency: float | None = figure("encoder efficiency")
    """Work of all items / ranks of the job / that of the busiest, by the plan; likewise."""
    encoder_ms: float | None = figure("encoder (ms)", ".1f")
    """Milliseconds that the slowest rank encoded, forward and, if it is trained, once more and
    backward, without waiting for others; None without an encoder."""
    mtp_loss: float | None = figure("mtp loss", ".6E")
    """Nats: mean loss of multi-token prediction over its depths; None without MTP."""
    sequences: int = figure("sequences", ",", default=MISSING)
    """Sequences of the global batch."""
    tokens: int = figure("tokens", ",", default=MISSING)
    """Tokens of the global batch, without padding and corrupt documents."""
    loss_tokens: int
    """Those of them that carry loss."""
    planned_efficiency: float | None = figure("planned efficiency")
    """Efficiency that the plan promises: total compute / ranks / makespan."""
    measured_efficiency: float | None = figure("measured efficiency")
    """The same as measured: mean time not spent waiting for other ranks / makespan."""
    makespan_s: float | None = None
    """Seconds from the start of the step until the last rank reaches gradient sync."""
    idle_share_mean: float | None = figure("idle share mean")
    """Mean over ranks of the share of the makespan spent idle: 1 - ``measured_efficiency``."""
    idle_share_max: float | None = figure("idle share max")
    """The same of the idlest rank: it waited for others, or was done."""
    ring_wait_s: float | None = figure("ring wait (ms)", ".1f", scale=1e3)
    """Seconds spent waiting for ring members, mean over ranks."""
    pipeline_wait_s: float | None = figure("pipeline wait (ms)", ".1f", scale=1e3, hides_zero=True)
    """Seconds spent waiting for other pipeline stages, mean over ranks."""
    sync_s: float | None = figure("gradient sync (ms)", ".1f", scale=1e3)
    """Seconds of gradient sync, the wait for the last rank included, mean over ranks."""
    ring_bytes: int | None = figure("ring traffic (MB)", ".1f", scale=1e-6)
    """Bytes that all ranks sent around rings, forward and backward."""
    all_to_all_bytes: int | None = figure("all-to-all (MB)", ".1f", scale=1e-6)
    """Bytes that all ranks exchanged with experts on other ranks, forward and backward, if experts
    get equally many tokens; None if every rank has all experts."""
    padding_share: float | None = figure("padding (%)", ".1f", scale=100, hides_zero=True)
    """Share of the slots in all ranks' lists that held padding."""
    offloaded_bytes: int | None = figure("offloaded (MB)", ".1f", scale=1e-6, hides_zero=True)
    """Bytes of activations that all ranks offloaded to host memory."""
    host_bytes_max: int | None = figure("host buffers (MB)", ".1f", scale=1e-6, hides_zero=True)
    """Bytes of host memory that the rank with the most holds for them."""
    planning_ms: float | None = figure("planning (ms)", ".2f")
    """Milliseconds that the planner took; most of it runs during the step before."""
    data_wait_ms: float | None = figure("data wait (ms)", ".2f")
    """Milliseconds that the slowest rank waited for its plan and its data."""
    loaders: int | None = None
    """Loaders of all sources in the data plane, standby loaders included; None without one."""
    steps_ahead: int | None = None
    """Prepared steps after this one, on the node with the fewest; None without a data plane."""
    skipped_documents: int | None = figure("skipped documents", "d", hides_zero=True)
    """Corrupt documents skipped since the start of the run."""
    planner_failures: int | None = figure("planner failures", "d", hides_zero=True)
    """Steps since the start of the run that fell back to the static plan."""
    slow_ranks: int | None = figure("stragglers", "d", hides_zero=True)
    """HDP ranks found to run below full speed; None without online cost calibration."""
    slowest_rank_speed: float | None = None
    """Speed found for the slowest HDP rank, where 1 is full speed; likewise."""
    cost_model_changes: int | None = None
    """Changes of the cost model and of speeds since the start of the run; likewise."""
    cost_model_error: float | None = None
    """Median error, over HDP ranks, of the compute that the cost model predicts; likewise."""
    micro_batches_min: int | None = None
    """Micro-batches of the rank that ran the fewest."""
    micro_batches_max: int | None = figure(
        "micro-batches", lambda step: f"{step.micro_batches_min}-{step.micro_batches_max}"
    )
    """Micro-batches of the rank that ran the most."""
    num_positions: int | None = None
    """Slots in the longest list of a rank, padding included."""
    sources: Mapping[str, SourceFigures] | None = figure("loss (share) by source", _sources_in_log)
    """Figures of each source of the data."""

    def log_parts(self, cls: type[StepFigures], leave_out: Collection[str] = ()) -> list[str]:
        """The parts of a log line for the figures that `cls` itself declares, in their order.

        Figures of the names to `leave_out` are not shown.
        """
        parts = [
            label.part(getattr(self, item.name), self)
            for item in fields(cls)
            if item.name in cls.__annotations__ and item.name not in leave_out
            for label in [item.metadata.get("log")]
            if label is not None
        ]
        return [part for part in parts if part is not None]

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
    encoder_flop: float = 0.0
    """FLOP of its items in the encoder, each encoded once and differentiated."""
    non_finite: tuple[str, ...] = ()
    """Micro-batches of any rank whose loss is NaN or infinite, in words."""


@dataclass(frozen=True)
class EvaluationLoss:
    """Mean losses over the batches of an evaluation, in nats."""

    loss: float
    sources: Mapping[str, float]
    """By source, of those that had loss tokens."""
    reward_margin: float | None = None
    """Mean over pairs; None without ``--hdp-objective``."""
    reward_accuracy: float | None = None
    """Likewise; None under ``kto``, too."""

    @classmethod
    def of(cls, reports: Sequence[StepReport]) -> EvaluationLoss:
        """That of all batches together."""
        found: dict[str, list[SourceFigures]] = {}
        for report in reports:
            for name, figures in (report.sources or {}).items():
                found.setdefault(name, []).append(figures)
        means = {name: _mean(parts) for name, parts in found.items()}
        sources = {name: mean for name, mean in means.items() if mean is not None}
        rewards = (_over_pairs(reports, name) for name in ("reward_margin", "reward_accuracy"))
        return cls(_mean(reports) or 0.0, sources, *rewards)


def _mean(parts: Sequence[StepFigures] | Sequence[SourceFigures]) -> float | None:
    """The mean loss of all loss tokens, or pairs; None where there is none."""
    counts = [one.loss_tokens if one.pairs is None else one.pairs for one in parts]
    losses = [one.loss or 0.0 for one in parts]
    total = sum(loss * count for loss, count in zip(losses, counts, strict=True))
    return total / sum(counts) if any(counts) else None


def _over_pairs(reports: Sequence[StepReport], name: str) -> float | None:
    """The mean of a figure over the pairs of the steps that have it."""
    found = [
        (value, one.pairs or 0) for one in reports if (value := getattr(one, name)) is not None
    ]
    pairs = sum(count for _, count in found)
    return sum(value * count for value, count in found) / pairs if pairs else None


@dataclass(frozen=True, kw_only=True)
class PreferenceFigures:
    """Those of `StepFigures` that a loss of preferences gives."""

    loss: float
    chosen_reward: float | None
    rejected_reward: float | None
    reward_margin: float | None
    reward_accuracy: float | None
    kto_divergence: float | None
    pairs: int

    @classmethod
    def of(
        cls, loss: float, pairs: int, found: RewardFigures, divergence: float | None
    ) -> PreferenceFigures:
        """Those of a step; what there is none of is None."""

        def known(value: float) -> float | None:
            return None if math.isnan(value) and math.isfinite(loss) else value

        return cls(
            loss=loss,
            chosen_reward=known(found.chosen),
            rejected_reward=known(found.rejected),
            reward_margin=known(found.margin),
            reward_accuracy=known(found.accuracy),
            kto_divergence=divergence,
            pairs=pairs,
        )


def figures_by_source(
    corpus: Corpus,
    totals: StepTotals,
    amounts: Amounts,
    losses: Sequence[float],
    num_skipped: Sequence[int],
    preferences: Sequence[tuple[float, int]] | None,
) -> dict[str, SourceFigures]:
    """Those of each source in a step.

    Args:
        corpus: of its split.
        totals: of the step.
        amounts: what is left of it.
        losses: sums of each source's, over all ranks.
        num_skipped: corrupt documents of each source.
        preferences: sum of the losses and pairs of each source, where that is what is trained.
    """
    drawn = {name: totals.after.of(name).amount for name in corpus.names}
    all_drawn = max(sum(drawn.values()), 1)
    found = {}
    for i, source in enumerate(corpus.sources):
        total, count = losses[i], amounts.source_loss_tokens[i]
        if preferences is not None:
            total, count = preferences[i]
        found[source.name] = SourceFigures(
            tokens=amounts.source_tokens[i],
            loss_tokens=amounts.source_loss_tokens[i],
            loss=total / count if count else None,
            share=drawn[source.name] / all_drawn,
            epoch=totals.before.of(source.name).rows // source.num_groups,
            bad=source.bad + num_skipped[i],
            pairs=None if preferences is None else count,
        )
    return found


def over_all_ranks(
    sums: Mapping[str, float], maxima: Mapping[str, float], device: torch.device
) -> dict[str, float]:
    """Sums and maxima over all ranks of the job, each by its name: two small all-reduces, one wait.

    Every rank gives the same names in the same order; the backend wants its tensors on `device`.
    """
    values = numbers_to_device([*sums.values(), *maxima.values()], torch.float64, device)
    dist.all_reduce(values[: len(sums)], dist.ReduceOp.SUM)
    if maxima:
        dist.all_reduce(values[len(sums) :], dist.ReduceOp.MAX)
    return dict(zip([*sums, *maxima], values.tolist(), strict=True))


@dataclass(frozen=True)
class FurtherLosses:
    """What losses of tokens behind the next one weigh in the steps of a split, and what they were.

    Their mean weighs `factor`; `depths` of 0 predict none.
    """

    depths: int
    factor: float
    place: RankPlace

    def weights(self, micro_batches: Sequence[RankMicroBatch], divisor: float) -> tuple[float, ...]:
        """What each depth's sum weighs, so that its mean counts as the factor says.

        All sums are divided by `divisor` at the end, mostly the loss tokens of the global batch.
        Every rank must call this, its corrupt documents dropped.
        """
        if not self.depths:
            return ()
        counts = np.zeros(self.depths)
        if self.place.is_last_stage and self.place.tensor_rank == 0:
            for one in micro_batches:
                counts += one.further_mask.reshape(self.depths, -1).sum(axis=1)
        sums = {str(depth): float(count) for depth, count in enumerate(counts)}
        share = self.factor / self.depths
        over_job = over_all_ranks(sums, {}, compute_device())
        return tuple(share * divisor / max(over_job[name], 1.0) for name in sums)

    def mean(self, total: float, divisor: float) -> float | None:
        """The mean over depths of their mean losses, of all ranks' weighted sums."""
        if not self.depths or not self.factor:
            return None
        return total / self.place.num_tensor_ranks / (self.factor * max(divisor, 1e-300))

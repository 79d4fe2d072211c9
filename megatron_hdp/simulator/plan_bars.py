"""The bars of a plan's picture: what every rank does when, as flat arrays."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_hdp.arrays import BoolArray, Float64Array, Int64Array
from megatron_hdp.planner import Evaluation, Plan
from megatron_hdp.planner.parts import time_shares
from megatron_hdp.planner.pipeline_evaluation import pass_shares


@dataclass(frozen=True, eq=False)
class Lanes:
    """Bars of all ranks on one pipeline stage.

    A member first runs its part of the ring, from ``start_s`` to ``ring_end_s``, then its whole
    local sequences, until ``own_end_s``; then it waits for the slowest member. Without a pipeline,
    entry ``i`` belongs to ``plan.ranks[i]`` and covers forward and backward. With one, all
    forwards come first and then, in the same order, all backwards; with several model chunks those
    of each chunk behind those of the one before. What runs in parts has a bar a part.
    """

    rank: Int64Array
    micro_batch: Int64Array
    degree: Int64Array
    start_s: Float64Array
    ring_end_s: Float64Array
    own_end_s: Float64Array
    backward: BoolArray
    """Whether the bar is the backward by itself; False everywhere without a pipeline."""
    chunk: Int64Array
    """The model chunk (virtual stage) that it runs through, 0 where a stage has one."""
    member: Int64Array
    """Its entry of ``plan.ranks``."""
    part: Int64Array
    """The part of its micro-batch, 0 where that runs whole."""

    @property
    def num_bars(self) -> int:
        """Bars of all ranks together."""
        return len(self.rank)


def lanes_of(plan: Plan, evaluation: Evaluation, stage: int = 0) -> Lanes:
    """Lay out a plan's bars on one pipeline stage, all of its model chunks.

    Raises:
        ValueError: ``evaluation`` was not made from this plan, or has no such stage.
    """
    if len(evaluation.local_s) != len(plan.ranks):
        raise ValueError(
            f"the evaluation has times of {len(evaluation.local_s)} members of micro-batches, the "
            f"plan has {len(plan.ranks)}: pass the plan that the evaluation was made from"
        )
    stages = evaluation.pipeline_stages
    if not 0 <= stage < stages:
        raise ValueError(f"stage is {stage}; expected 0 to {stages - 1}")
    if stages == 1:
        return _bars(plan, evaluation, evaluation.start_s, np.ones(plan.num_micro_batches))
    rows = evaluation.forward_start_s[stage::stages], evaluation.backward_start_s[stage::stages]
    weights = evaluation.pipeline.row_weights[stage::stages]
    bars = [
        _bars(plan, evaluation, starts_s, shares * weights[chunk], chunk)
        for shares, of_chunks in zip(pass_shares(plan, plan.num_micro_batches), rows, strict=True)
        for chunk, starts_s in enumerate(of_chunks)
    ]
    if evaluation.part_starts_s is not None:
        starts = [row for of_pass in evaluation.part_starts_s for row in of_pass[stage::stages]]
        bars = [in_parts(*one, plan) for one in zip(bars, starts, strict=True)]
    joined = joined_bars(bars)
    return replace(joined, backward=np.repeat([False, True], joined.num_bars // 2))


def bars_by_rank(lanes: Lanes, num_ranks: int) -> tuple[Int64Array, Int64Array]:
    """The bars of every rank in the order of time, rank after rank, and where each rank's begin."""
    bars = np.lexsort((lanes.own_end_s, lanes.start_s, lanes.rank))
    counts = np.bincount(lanes.rank, minlength=num_ranks)
    return bars, np.concatenate([[0], np.cumsum(counts)])


def in_parts(lanes: Lanes, starts_s: Float64Array, plan: Plan) -> Lanes:
    """Cuts each bar into its micro-batch's parts, which start at these times (`time_shares`).

    One micro-batch's starts stand behind another's; a bar's waiting lies behind its last part.
    """
    parts = plan.parts_of_each
    counts = parts[lanes.micro_batch]
    of = np.repeat(np.arange(lanes.num_bars), counts)
    part = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
    here = (np.cumsum(parts) - parts)[lanes.micro_batch[of]] + part
    start_s, shares = starts_s[here], time_shares(plan)[here]
    ring_s, own_s = (
        (end_s - lanes.start_s)[of] * shares for end_s in (lanes.ring_end_s, lanes.own_end_s)
    )
    whole = {name: values[of] for name, values in vars(lanes).items()}
    ends = {"ring_end_s": start_s + ring_s, "own_end_s": start_s + own_s}
    return Lanes(**whole | ends | {"start_s": start_s, "part": part})


def joined_bars(parts: Sequence[Lanes]) -> Lanes:
    """All bars of these lanes, one behind the other."""
    return Lanes(
        **{name: np.concatenate([vars(one)[name] for one in parts]) for name in vars(parts[0])}
    )


def of_chunk(lanes: Lanes, chunk: int) -> Lanes:
    """The bars that run through one model chunk."""
    mine = lanes.chunk == chunk
    return Lanes(**{name: values[mine] for name, values in vars(lanes).items()})


def _bars(
    plan: Plan, evaluation: Evaluation, starts_s: Float64Array, shares: Float64Array, chunk: int = 0
) -> Lanes:
    """Bars that start with their micro-batch and take its share of its members' time."""
    degrees = np.diff(plan.rank_offsets)
    micro_batch = np.repeat(np.arange(plan.num_micro_batches), degrees)
    start_s, share = starts_s[micro_batch], shares[micro_batch]
    return Lanes(
        rank=plan.ranks.astype(np.int64),
        micro_batch=micro_batch,
        degree=degrees[micro_batch],
        start_s=start_s,
        ring_end_s=start_s + (evaluation.own_s - evaluation.local_s) * share,
        own_end_s=start_s + evaluation.own_s * share,
        backward=np.zeros(len(micro_batch), dtype=np.bool_),
        chunk=np.full(len(micro_batch), chunk),
        member=np.arange(len(micro_batch)),
        part=np.zeros(len(micro_batch), dtype=np.int64),
    )


@dataclass(frozen=True, eq=False)
class Chart:
    """The lanes of a picture, from top to bottom: ranks, or the stages of every rank."""

    bars: Lanes
    row: Int64Array
    """The lane of each bar."""
    num_rows: int
    stages_a_rank: int
    """Stages that are drawn, from the first: all of them, or one where that would be too much."""


def chart_of(plan: Plan, evaluation: Evaluation, max_rows: int) -> Chart:
    """Lay out a picture; of a pipeline all stages if they need at most ``max_rows`` lanes.

    Raises:
        ValueError: ``evaluation`` was not made from this plan.
    """
    stages = evaluation.pipeline_stages
    shown = stages if plan.num_ranks * stages <= max_rows else 1
    parts = [lanes_of(plan, evaluation, stage) for stage in range(shown)]
    bars = joined_bars(parts)
    stage = np.repeat(np.arange(shown), [part.num_bars for part in parts])
    return Chart(bars, bars.rank * shown + stage, plan.num_ranks * shown, shown)


def default_title(plan: Plan, evaluation: Evaluation) -> str:
    """Return one line on a plan."""
    return (
        f"{plan.strategy}: {len(plan.lengths):,} sequences, {plan.lengths.sum():,} tokens on "
        f"{plan.num_ranks:,} ranks of {plan.tokens_per_rank:,} tokens, "
        f"efficiency {evaluation.efficiency:.3f}"
    )

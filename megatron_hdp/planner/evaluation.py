"""Replays a plan under a cost model: how long each rank works, waits, and the step takes.

Written apart from the C++ planner, so that each can be checked against the other. It goes through
the micro-batches in runs, so that the figures of millions need the memory of one run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from megatron_hdp.arrays import Float64Array
from megatron_hdp.planner.bounds import (
    exposed_s,
    lower_bound_s,
    speeds_of,
    total_compute_s,
)
from megatron_hdp.planner.cost_model import CostModel
from megatron_hdp.planner.flat_plan import counts_of, pieces, span_of
from megatron_hdp.planner.member_work import MemberWork, copies_of_stream, work_of
from megatron_hdp.planner.parts import shares_of_parts, sizes_of_parts
from megatron_hdp.planner.pipeline import Pipeline
from megatron_hdp.planner.pipeline_bounds import pipeline_bound_of, pipeline_target_s
from megatron_hdp.planner.pipeline_evaluation import PipelineSchedule, pipeline_schedule
from megatron_hdp.planner.types import Plan

_ONE_STAGE = Pipeline()
_TWICE = 4 / 3
"""What a second forward pass makes of a ring's traffic, or of compute."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Figures:
    """What a plan takes, in all."""

    busy_s: Float64Array
    """Time of each rank's own work on a stage, the mean of them, waiting for others left out."""
    makespan_s: float
    """From the start of the step to the last rank's end."""
    total_compute_s: float
    """Time of all sequences on one rank of speed 1, without blocks and g."""
    total_speed: float
    """Sum of the ranks' speeds."""
    lower_bound_s: float
    """No plan is faster: ``lower_bound_s``, with stages ``pipeline_lower_bound_s``."""
    pipeline_bound_s: float
    """What a good plan takes: ``bounds.pipeline_target_s``; without stages the lower bound."""
    ring_bytes: float
    """Bytes that all ranks send in rings, forward and backward."""
    pipeline: Pipeline
    """That each rank is."""

    @property
    def pipeline_stages(self) -> int:
        """Stages of each rank."""
        return self.pipeline.stages

    @property
    def model_chunks(self) -> int:
        """Parts of the model on each stage (virtual stages)."""
        return self.pipeline.chunks

    @property
    def efficiency(self) -> float:
        """Share of the makespan that compute fills, by speed; 1 for a plan that takes no time."""
        if self.makespan_s == 0:
            return 1.0
        return self.total_compute_s / self.total_speed / self.pipeline_stages / self.makespan_s

    @property
    def idle_share(self) -> float:
        """Share of the ranks' time in which they have no work of their own."""
        whole = self.makespan_s * len(self.busy_s)
        return 1.0 - float(self.busy_s.sum()) / whole if whole else 0.0


@dataclass(frozen=True, eq=False, kw_only=True)
class Evaluation(Figures):
    """All times of a plan; one entry a micro-batch, a rank or a member of a micro-batch."""

    forward_start_s: Float64Array
    """When the forward of each micro-batch starts on each stage; shape (stages, micro-batches).

    With several model chunks the stages of the first come first, then those of the next.
    """
    backward_start_s: Float64Array
    """The same for the backward, which takes two thirds of a micro-batch's time."""
    duration_s: Float64Array
    """How long each micro-batch takes, all stages, forward and backward: its slowest member."""
    own_s: Float64Array
    """Time of each member's own work; one entry for each of ``plan.ranks``."""
    local_s: Float64Array
    """The part of it for the member's own local sequences."""
    exposed_s: Float64Array
    """Ring traffic of each micro-batch that attention does not hide on its fastest member."""
    part_starts_s: tuple[Float64Array, Float64Array] | None = None
    """Where micro-batches run in parts: starts of all parts, forward and backward, stage by stage;
    one micro-batch's parts behind another's, each with its `time_shares`."""

    @property
    def start_s(self) -> Float64Array:
        """When each micro-batch starts on the first stage: when the last of its ranks is free."""
        starts: Float64Array = self.forward_start_s[0]
        return starts


def evaluate(
    plan: Plan,
    cost_model: CostModel,
    pipeline_stages: int = 1,
    model_chunks: int = 1,
    stage_weights: Sequence[float] = (),
) -> Evaluation:
    """Replays a valid plan; the formulas are those of ``megatron_hdp.planner.cost_model``.

    Args:
        plan: what to replay.
        cost_model: of a rank, all stages.
        pipeline_stages: stages P of each rank.
        model_chunks: parts V of the model on each stage; above 1 the schedule is interleaved, and
            counts are padded to multiples of P.
        stage_weights: relative time of each part in the model's order (chunk c of stage s is part
            c P + s), ``[P V]``; empty: all alike.

    Raises:
        ValueError: the cost model has speeds, but not one for each rank; there is no stage; or
            the plan's order makes pipelines wait for each other for ever.
    """
    pipeline = Pipeline(pipeline_stages, model_chunks, tuple(stage_weights))
    totals = _Totals(plan, cost_model, pipeline)
    own_s, local_s = np.empty(len(plan.ranks)), np.zeros(len(plan.ranks))
    exposed, duration_s = np.zeros(plan.num_micro_batches), np.empty(plan.num_micro_batches)
    for times in _times_of_runs(plan, cost_model, pipeline_stages):
        totals.add(times)
        own_s[times.members], local_s[times.members] = times.own_s, times.local_s
        exposed[times.run], duration_s[times.run] = times.exposed_s, times.duration_s
    schedule = replay(plan, duration_s, pipeline)
    evaluation = Evaluation(
        forward_start_s=schedule.forward_start_s,
        backward_start_s=schedule.backward_start_s,
        duration_s=duration_s,
        own_s=own_s,
        local_s=local_s,
        exposed_s=exposed,
        makespan_s=schedule.makespan_s,
        part_starts_s=schedule.part_starts_s,
        **totals.figures(),
    )
    for value in vars(evaluation).values():
        if isinstance(value, np.ndarray):
            value.setflags(write=False)
    return evaluation


def durations_s(plan: Plan, cost_model: CostModel, pipeline_stages: int = 1) -> Float64Array:
    """How long each micro-batch takes, all stages, forward and backward: its slowest member."""
    found = np.empty(plan.num_micro_batches)
    for times in _times_of_runs(plan, cost_model, pipeline_stages):
        found[times.run] = times.duration_s
    return found


def replay(
    plan: Plan, duration_s: Float64Array, pipeline: Pipeline = _ONE_STAGE
) -> PipelineSchedule:
    """Runs a plan whose micro-batches take so long: all stages, forward and backward.

    Raises:
        ValueError: the plan's order makes pipelines wait for each other for ever.
    """
    if pipeline.stages == 1:
        return _schedule(plan, duration_s)
    return pipeline_schedule(plan, duration_s, pipeline)


def figures(
    plan: Plan,
    cost_model: CostModel,
    pipeline_stages: int = 1,
    model_chunks: int = 1,
    stage_weights: Sequence[float] = (),
) -> Figures:
    """The figures of ``evaluate``, to the bit, in a fraction of its memory without stages.

    The arguments are those of ``evaluate``.

    Raises:
        ValueError: as ``evaluate``.
    """
    if pipeline_stages > 1:
        return evaluate(plan, cost_model, pipeline_stages, model_chunks, stage_weights)
    totals = _Totals(plan, cost_model, Pipeline(pipeline_stages, model_chunks))
    clocks = np.zeros(plan.num_ranks)
    for times in _times_of_runs(plan, cost_model, pipeline_stages):
        totals.add(times)
        _launch(plan, times.run, times.duration_s, clocks)
    return Figures(makespan_s=float(clocks.max()), **totals.figures())


class _Times(NamedTuple):
    """The times of a run of micro-batches and of their members."""

    run: slice
    members: slice
    """Their entries of ``plan.ranks``."""
    own_s: Float64Array
    local_s: Float64Array
    exposed_s: Float64Array
    """Of each micro-batch's fastest member."""
    duration_s: Float64Array
    ring_bytes: Float64Array
    """Sent by all members of each."""


class _Totals:
    """Sums over the runs, and what a plan has whatever its order."""

    def __init__(self, plan: Plan, cost_model: CostModel, pipeline: Pipeline) -> None:
        self._plan, self._cost_model, self._pipeline = plan, cost_model, pipeline
        self._total_speed = float(speeds_of(cost_model, plan.num_ranks).sum())
        self._busy_s = np.zeros(plan.num_ranks)
        self._ring_bytes = np.zeros(plan.num_micro_batches)  # no memory where there are no rings

    def add(self, times: _Times) -> None:
        """Add the next run."""
        per_stage_s = times.own_s / self._pipeline.stages
        np.add.at(self._busy_s, self._plan.ranks[times.members], per_stage_s)
        if times.ring_bytes.any():
            self._ring_bytes[times.run] = times.ring_bytes

    def figures(self) -> dict[str, Any]:
        """The fields of ``Figures`` but for the makespan."""
        plan, cost_model, pipeline = self._plan, self._cost_model, self._pipeline
        total_s = total_compute_s(plan.lengths, cost_model)
        bound_s = least_s = lower_bound_s(plan.lengths, plan.num_ranks, cost_model, pipeline.stages)
        if pipeline.stages > 1:
            least_s = pipeline_bound_of(plan, cost_model, pipeline)
            if plan.num_parts is not None:  # no sequence passes alone
                bound_s = total_s / self._total_speed
        self._busy_s.setflags(write=False)
        return {
            "busy_s": self._busy_s,
            "total_compute_s": total_s,
            "total_speed": self._total_speed,
            "lower_bound_s": least_s,
            "pipeline_bound_s": pipeline_target_s(
                bound_s, plan.tokens_per_rank, cost_model, pipeline
            ),
            "ring_bytes": float(self._ring_bytes.sum()),
            "pipeline": pipeline,
        }


def _schedule(plan: Plan, duration_s: Float64Array) -> PipelineSchedule:
    """Runs the micro-batches in launch order."""
    clocks = np.zeros(plan.num_ranks)
    forward = np.empty((1, plan.num_micro_batches))
    for run in pieces(plan.rank_offsets):
        forward[0, run] = _starts(plan, run, duration_s[run], clocks)
    return PipelineSchedule(forward, forward + _forward_s(plan, duration_s), float(clocks.max()))


def _forward_s(plan: Plan, duration_s: Float64Array) -> Float64Array:
    return np.where(plan.runs_twice, duration_s / 4, duration_s / 3)


def _launch(plan: Plan, run: slice, duration_s: Float64Array, clocks: Float64Array) -> None:
    """Moves the ranks' clocks over a run of micro-batches."""
    members = span_of(plan.rank_offsets, run)
    if members.stop - members.start == run.stop - run.start:
        np.add.at(clocks, plan.ranks[members], duration_s)  # one after the other: nobody waits
    else:
        _starts(plan, run, duration_s, clocks)


def _starts(plan: Plan, run: slice, duration_s: Float64Array, clocks: Float64Array) -> list[float]:
    """Moves the clocks; members of a ring wait for each other. When each micro-batch starts."""
    free_s = clocks.tolist()
    ranks = iter(plan.ranks[span_of(plan.rank_offsets, run)].tolist())
    degrees = counts_of(plan.rank_offsets, run).tolist()
    starts = []
    for degree, duration in zip(degrees, duration_s.tolist(), strict=True):
        if degree == 1:
            rank = next(ranks)
            start = free_s[rank]
            free_s[rank] = start + duration
        else:
            members = list(islice(ranks, degree))
            start = max([free_s[rank] for rank in members])
            for rank in members:
                free_s[rank] = start + duration
        starts.append(start)
    clocks[:] = free_s
    return starts


def _times_of_runs(plan: Plan, cost_model: CostModel, stages: int) -> Iterator[_Times]:
    speeds = speeds_of(cost_model, plan.num_ranks)
    for run in pieces(plan.rank_offsets, plan.sequence_offsets, plan.local_offsets):
        work = work_of(plan, cost_model, stages, speeds, run)
        of_micro_batches = work.degrees, work.transfer_s, work.hop_s, work.home_s
        degrees, transfer, hop, home = (
            np.repeat(one, work.num_members) for one in of_micro_batches
        )
        forwards = np.repeat(np.where(plan.runs_twice[run], 2, 1), work.num_members)
        exposed = exposed_s(degrees, transfer, hop, work.attention_s, num_forwards=forwards) + home
        ring_bytes = work.ring_bytes
        if plan.recomputed is not None:
            ring_bytes = ring_bytes * np.where(plan.recomputed[run], _TWICE, 1.0)
        if plan.num_parts is not None:
            ring_bytes = _go_in_parts(plan, cost_model, run, work, exposed, ring_bytes)
        ring_bytes = ring_bytes + work.made_bytes * np.where(plan.runs_twice[run], _TWICE, 1.0)
        own_s = work.attention_s + work.linear_s + exposed + work.local_s + work.fixed_s
        if (forwards > 1).any():  # a third of what is computed is forward
            own_s += np.where(forwards > 1, (own_s - exposed) / 3, 0.0)
        yield _Times(
            run=run,
            members=work.members,
            own_s=own_s,
            local_s=work.local_s,
            exposed_s=np.maximum.reduceat(exposed, work.first_members),
            duration_s=np.maximum.reduceat(own_s, work.first_members),
            ring_bytes=ring_bytes,
        )


def _go_in_parts(
    plan: Plan,
    cost_model: CostModel,
    run: slice,
    work: MemberWork,
    exposed: Float64Array,
    whole_bytes: Float64Array,
) -> Float64Array:
    """Puts what the rings of micro-batches in parts expose into ``exposed``; what each sends."""
    ring_bytes, twice = whole_bytes.copy(), plan.runs_twice[run]
    is_stream, on_host = plan.is_stream[run], plan.streams_from_host[run]
    in_parts = plan.parts_of_each[run] > 1
    for m in np.flatnonzero(in_parts & (is_stream | (work.num_members > 1))).tolist():
        sizes = sizes_of_parts(plan, run.start + m)
        if not sum(size.tokens for size in sizes):
            continue  # all lies whole on its members
        first = int(work.first_members[m])
        members = slice(first, first + int(work.num_members[m]))
        # on the host, keys of each earlier part go around by themselves, the first with our own
        sent, seen = shares_of_parts(sizes, 0.0 if on_host[m] else cost_model.query_ratio)
        passes = [max(1, earlier) if on_host[m] else 1 for earlier in range(len(sizes))]
        exposed[members] = work.home_s[m] * sum(sent)
        for sent_share, seen_share, times in zip(sent, seen, passes, strict=True):
            exposed[members] += exposed_s(
                work.degrees[m],
                work.transfer_s[m] * sent_share,
                work.hop_s[m] * times,
                work.attention_s[members] * seen_share,
                num_forwards=2 if twice[m] else 1,
            )
        ring_bytes[m] *= sum(sent) * (_TWICE if is_stream[m] else 1)
        if on_host[m]:
            forward_s, backward_s = copies_of_stream(plan, cost_model, run.start + m, work, members)
            exposed[members] += 2 * forward_s + backward_s
    return ring_bytes

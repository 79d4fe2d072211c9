"""Replays a plan under a cost model: how long each rank works, waits, and the step takes.

Written apart from the C++ planner, so that each can be checked against the other.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_hdp.planner.bounds import (
    compute_s,
    lower_bound_s,
    pipeline_lower_bound_s,
    pipeline_target_s,
    speeds_of,
)
from megatron_hdp.planner.cost_model import CostModel
from megatron_hdp.planner.flat_plan import pieces
from megatron_hdp.planner.pipeline_evaluation import PipelineSchedule, pipeline_schedule
from megatron_hdp.planner.types import Plan

Float64Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The times of a plan; one entry a micro-batch, a rank or a member of a micro-batch."""

    forward_start_s: Float64Array
    """When the forward of each micro-batch starts on each stage; shape (stages, micro-batches)."""
    backward_start_s: Float64Array
    """The same for the backward, which takes two thirds of a micro-batch's time."""
    duration_s: Float64Array
    """How long each micro-batch takes, all stages, forward and backward: its slowest member."""
    own_s: Float64Array
    """Time of each member's own work; one entry for each of ``plan.ranks``."""
    local_s: Float64Array
    """The part of it for the member's own local sequences."""
    busy_s: Float64Array
    """Time of each rank's own work on one stage, waiting for others left out."""
    makespan_s: float
    """From the start of the step to the last rank's end."""
    total_compute_s: float
    """Time of all sequences on one rank of speed 1, without g."""
    total_speed: float
    """Sum of the ranks' speeds."""
    lower_bound_s: float
    """No plan is faster: ``lower_bound_s``, with stages ``pipeline_lower_bound_s``."""
    pipeline_bound_s: float
    """What a good plan takes: ``bounds.pipeline_target_s``; without stages the lower bound."""
    ring_bytes: float
    """Bytes that all ranks send in rings, forward and backward."""
    exposed_s: Float64Array
    """Ring traffic of each micro-batch that attention does not hide on its fastest member."""

    @property
    def pipeline_stages(self) -> int:
        """Stages of each rank."""
        return len(self.forward_start_s)

    @property
    def start_s(self) -> Float64Array:
        """When each micro-batch starts on the first stage: when the last of its ranks is free."""
        starts: Float64Array = self.forward_start_s[0]
        return starts

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


def evaluate(plan: Plan, cost_model: CostModel, pipeline_stages: int = 1) -> Evaluation:
    """Replays a valid plan; the formulas are those of ``megatron_hdp.planner.cost_model``.

    Raises:
        ValueError: the cost model has speeds, but not one for each rank; there is no stage; or
            the plan's order makes pipelines wait for each other for ever.
    """
    if pipeline_stages < 1:
        raise ValueError(f"pipeline_stages is {pipeline_stages}; expected at least 1")
    speeds = speeds_of(cost_model, plan.num_ranks)
    members = _member_times(plan, cost_model, speeds)
    duration_s = _greatest(plan.rank_offsets, members.own_s)
    if pipeline_stages == 1:
        schedule = _schedule(plan, duration_s)
    else:
        schedule = pipeline_schedule(plan, duration_s, pipeline_stages)
    bound_s = lower_bound_s(plan.lengths, plan.num_ranks, cost_model)
    evaluation = Evaluation(
        forward_start_s=schedule.forward_start_s,
        backward_start_s=schedule.backward_start_s,
        duration_s=duration_s,
        own_s=members.own_s,
        local_s=members.local_s,
        busy_s=_busy_s(plan, members.own_s, pipeline_stages),
        exposed_s=members.exposed_s,
        makespan_s=schedule.makespan_s,
        total_compute_s=float(compute_s(plan.lengths, cost_model).sum()),
        total_speed=float(speeds.sum()),
        lower_bound_s=_lower_bound_s(plan, cost_model, pipeline_stages, bound_s),
        pipeline_bound_s=pipeline_target_s(
            bound_s, plan.tokens_per_rank, cost_model, pipeline_stages
        ),
        ring_bytes=members.ring_bytes,
    )
    for value in vars(evaluation).values():
        if isinstance(value, np.ndarray):
            value.setflags(write=False)
    return evaluation


def _lower_bound_s(plan: Plan, cost_model: CostModel, stages: int, bound_s: float) -> float:
    if stages == 1:
        return bound_s
    capacity = plan.tokens_per_rank
    if plan.offload_ratios.any():  # at ratio 1 only two layers stay resident
        capacity = -(-capacity * cost_model.num_layers // min(2, cost_model.num_layers))
    return pipeline_lower_bound_s(plan.lengths, plan.num_ranks, cost_model, stages, capacity)


def _schedule(plan: Plan, duration_s: Float64Array) -> PipelineSchedule:
    """Runs the micro-batches in launch order; members of a ring wait for each other."""
    clocks = [0.0] * plan.num_ranks
    forward = np.empty((1, plan.num_micro_batches))
    for run in pieces(plan.rank_offsets):
        begin, end = _span(plan.rank_offsets, run)
        ranks = iter(plan.ranks[begin:end].tolist())
        degrees = np.diff(plan.rank_offsets[run.start : run.stop + 1]).tolist()
        starts = []
        for degree, duration in zip(degrees, duration_s[run].tolist(), strict=True):
            if degree == 1:
                rank = next(ranks)
                start = clocks[rank]
                clocks[rank] = start + duration
            else:
                members = list(islice(ranks, degree))
                start = max([clocks[rank] for rank in members])
                for rank in members:
                    clocks[rank] = start + duration
            starts.append(start)
        forward[0, run] = starts
    return PipelineSchedule(forward, forward + duration_s / 3, max(clocks))


class _Members(NamedTuple):
    """One entry for each of ``plan.ranks``, and the bytes that all of them send."""

    own_s: Float64Array
    local_s: Float64Array
    exposed_s: Float64Array
    """One entry a micro-batch, of its fastest member."""
    ring_bytes: float


def _member_times(plan: Plan, cost_model: CostModel, speeds: Float64Array) -> _Members:
    num_members = np.diff(plan.rank_offsets)
    degrees = num_members.astype(np.float64)
    tokens = _per_micro_batch(plan, lambda lengths: lengths)
    squares = _per_micro_batch(plan, lambda lengths: lengths.astype(np.float64) ** 2)
    sent = 3 * (degrees - 1) / degrees * tokens * cost_model.kv_bytes_per_token
    bandwidth = np.where(
        _in_one_node(plan, cost_model.ranks_per_node),
        cost_model.intra_node_bytes_per_s,
        cost_model.inter_node_bytes_per_s,
    )
    of_ring = {
        "attention": cost_model.a * squares / degrees,
        "linear": cost_model.b * tokens / degrees,
        "transfer": sent / bandwidth,
    }
    local_s = _local_times(plan, cost_model)
    own_s, exposed_s = np.empty(len(plan.ranks)), np.empty(plan.num_micro_batches)
    for run in pieces(plan.rank_offsets):
        here = slice(*_span(plan.rank_offsets, run))
        each = {name: np.repeat(values[run], num_members[run]) for name, values in of_ring.items()}
        speed = speeds[plan.ranks[here]]
        attention_s = each["attention"] / speed
        exposed = np.maximum(0.0, each["transfer"] - attention_s)
        if len(plan.local_sequences):
            local_s[here] /= speed
        own_s[here] = (
            attention_s + each["linear"] / speed + exposed + local_s[here] + cost_model.g / speed
        )
        exposed_s[run] = _greatest(
            plan.rank_offsets[run.start : run.stop + 1] - here.start, exposed
        )
    return _Members(own_s, local_s, exposed_s, float((sent * degrees).sum()))


def _greatest(offsets: NDArray[np.int64], values: Float64Array) -> Float64Array:
    """The greatest of the values that each micro-batch owns, at least one each."""
    if len(offsets) == 1:
        return np.zeros(0)
    greatest: Float64Array = np.maximum.reduceat(values, offsets[:-1])
    return greatest


def _sums(
    keys: NDArray[np.integer[Any]], values: NDArray[Any], num_keys: int
) -> NDArray[np.float64]:
    """Sum of the values of each key."""
    return np.bincount(keys, weights=values, minlength=num_keys).astype(np.float64, copy=False)


def _busy_s(plan: Plan, own_s: Float64Array, stages: int) -> Float64Array:
    """Seconds that each rank works on one stage."""
    busy_s = np.zeros(plan.num_ranks)
    for run in pieces(plan.rank_offsets):
        here = slice(*_span(plan.rank_offsets, run))
        np.add.at(busy_s, plan.ranks[here], own_s[here] / stages)
    return busy_s


def _span(offsets: NDArray[np.int64], run: slice) -> tuple[int, int]:
    """The entries that a run of micro-batches owns."""
    return int(offsets[run.start]), int(offsets[run.stop])


def _owners(offsets: NDArray[np.int64], run: slice) -> NDArray[np.int64]:
    """The micro-batch of each of these entries, counted from the run's first."""
    return np.repeat(np.arange(run.stop - run.start), np.diff(offsets[run.start : run.stop + 1]))


def _per_micro_batch(
    plan: Plan, value_of: Callable[[NDArray[np.int64]], NDArray[Any]]
) -> Float64Array:
    """Sums over the sharded sequences of each micro-batch, of a value of their lengths."""
    sums = np.zeros(plan.num_micro_batches)
    for run in pieces(plan.sequence_offsets):
        lengths = plan.lengths[plan.sequences[slice(*_span(plan.sequence_offsets, run))]]
        owner = _owners(plan.sequence_offsets, run)
        sums[run] = _sums(owner, value_of(lengths), run.stop - run.start)
    return sums


def _in_one_node(plan: Plan, ranks_per_node: int) -> NDArray[np.bool_]:
    if plan.num_micro_batches == 0:
        return np.zeros(0, dtype=np.bool_)
    nodes = plan.ranks // ranks_per_node
    starts = plan.rank_offsets[:-1]
    same: NDArray[np.bool_] = np.minimum.reduceat(nodes, starts) == np.maximum.reduceat(
        nodes, starts
    )
    return same


def _local_times(plan: Plan, cost_model: CostModel) -> Float64Array:
    """Time of the local sequences of each entry of ``plan.ranks`` at speed 1."""
    local_s = np.zeros(len(plan.ranks))
    if not len(plan.local_sequences):
        return local_s
    for run in pieces(plan.rank_offsets, plan.local_offsets):
        here = slice(*_span(plan.rank_offsets, run))
        there = slice(*_span(plan.local_offsets, run))
        keys = _owners(plan.rank_offsets, run) * plan.num_ranks + plan.ranks[here]
        by_key = np.argsort(keys)
        local_keys = _owners(plan.local_offsets, run) * plan.num_ranks + plan.local_ranks[there]
        members = by_key[np.searchsorted(keys, local_keys, sorter=by_key)]
        seconds = compute_s(plan.lengths[plan.local_sequences[there]], cost_model)
        local_s[here] = _sums(members, seconds, len(keys))
    return local_s

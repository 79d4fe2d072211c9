"""Replays a plan under a cost model: how long each rank works, waits, and the step takes.

Written apart from the C++ planner, so that each can be checked against the other.
"""

from dataclasses import dataclass
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
        busy_s=_sums(plan.ranks, members.own_s / pipeline_stages, plan.num_ranks),
        exposed_s=_greatest(plan.rank_offsets, members.exposed_s),
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
    starts = []
    offsets = plan.rank_offsets.tolist()
    ranks = plan.ranks.tolist()
    for m, duration in enumerate(duration_s.tolist()):
        members = ranks[offsets[m] : offsets[m + 1]]
        start = max(clocks[rank] for rank in members)
        starts.append(start)
        for rank in members:
            clocks[rank] = start + duration
    forward = np.array([starts], dtype=np.float64)
    return PipelineSchedule(forward, forward + duration_s / 3, max(clocks))


class _Members(NamedTuple):
    """One entry for each of ``plan.ranks``, and the bytes that all of them send."""

    own_s: Float64Array
    local_s: Float64Array
    exposed_s: Float64Array
    ring_bytes: float


def _member_times(plan: Plan, cost_model: CostModel, speeds: Float64Array) -> _Members:
    degrees = np.diff(plan.rank_offsets).astype(np.float64)
    owner = np.repeat(np.arange(plan.num_micro_batches), np.diff(plan.rank_offsets))
    speed = speeds[plan.ranks]
    lengths = plan.lengths[plan.sequences]
    tokens = _per_micro_batch(plan.sequence_offsets, lengths)
    squares = _per_micro_batch(plan.sequence_offsets, lengths.astype(np.float64) ** 2)
    attention_s = (cost_model.a * squares / degrees)[owner] / speed
    linear_s = (cost_model.b * tokens / degrees)[owner] / speed
    sent = 3 * (degrees - 1) / degrees * tokens * cost_model.kv_bytes_per_token
    bandwidth = np.where(
        _in_one_node(plan, cost_model.ranks_per_node),
        cost_model.intra_node_bytes_per_s,
        cost_model.inter_node_bytes_per_s,
    )
    exposed_s = np.maximum(0.0, (sent / bandwidth)[owner] - attention_s)
    local_s = _local_times(plan, cost_model, owner) / speed
    own_s = attention_s + linear_s + exposed_s + local_s + cost_model.g / speed
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


def _per_micro_batch(offsets: NDArray[np.int64], values: NDArray[Any]) -> NDArray[np.float64]:
    """Sums of the values that each micro-batch owns."""
    owner = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    return _sums(owner, values, len(offsets) - 1)


def _in_one_node(plan: Plan, ranks_per_node: int) -> NDArray[np.bool_]:
    if plan.num_micro_batches == 0:
        return np.zeros(0, dtype=np.bool_)
    nodes = plan.ranks // ranks_per_node
    starts = plan.rank_offsets[:-1]
    same: NDArray[np.bool_] = np.minimum.reduceat(nodes, starts) == np.maximum.reduceat(
        nodes, starts
    )
    return same


def _local_times(
    plan: Plan, cost_model: CostModel, owner: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Time of the local sequences of each entry of ``plan.ranks``."""
    keys = owner * plan.num_ranks + plan.ranks
    by_key = np.argsort(keys)
    local_owner = np.repeat(np.arange(plan.num_micro_batches), np.diff(plan.local_offsets))
    local_keys = local_owner * plan.num_ranks + plan.local_ranks
    members = by_key[np.searchsorted(keys, local_keys, sorter=by_key)]
    seconds = compute_s(plan.lengths[plan.local_sequences], cost_model)
    return _sums(members, seconds, len(keys))

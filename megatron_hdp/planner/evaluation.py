"""Replays a plan under a cost model: how long each rank works, waits, and the step takes.

Written apart from the C++ planner, so that each can be checked against the other.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_hdp.planner.cost_model import CostModel
from megatron_hdp.planner.types import Plan


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The times of a plan; one entry a micro-batch, a rank or a member of a micro-batch."""

    start_s: NDArray[np.float64]
    """When each micro-batch starts: when the last of its ranks is free."""
    duration_s: NDArray[np.float64]
    """How long it takes: the time of its slowest member."""
    local_s: NDArray[np.float64]
    """Time of each member's own local sequences; one entry for each of ``plan.ranks``."""
    busy_s: NDArray[np.float64]
    """Time of each rank's own work, waiting for others left out."""
    makespan_s: float
    """From the start of the step to the last rank's end."""
    total_compute_s: float
    """Time of all sequences on one rank, without g."""
    lower_bound_s: float
    """No plan is faster: see ``lower_bound_s``."""
    ring_bytes: float
    """Bytes that all ranks send in rings, forward and backward."""
    exposed_s: NDArray[np.float64]
    """Ring traffic of each micro-batch that attention does not hide."""

    @property
    def efficiency(self) -> float:
        """(total compute / number of ranks) / makespan; 1 for a plan that takes no time."""
        if self.makespan_s == 0:
            return 1.0
        return self.total_compute_s / len(self.busy_s) / self.makespan_s


def evaluate(plan: Plan, cost_model: CostModel) -> Evaluation:
    """Replays a valid plan; the formulas are those of ``megatron_hdp.planner.cost_model``."""
    degrees = np.diff(plan.rank_offsets).astype(np.float64)
    owner = np.repeat(np.arange(plan.num_micro_batches), np.diff(plan.rank_offsets))
    ring_s, exposed_s, ring_bytes = _ring_times(plan, cost_model, degrees)
    local_s = _local_times(plan, cost_model, owner)
    own_s = ring_s[owner] + local_s
    duration_s = np.zeros(plan.num_micro_batches)
    np.maximum.at(duration_s, owner, own_s)
    start_s, makespan_s = _starts(plan, duration_s)
    total_compute_s = float(_compute_s(plan.lengths, cost_model).sum())
    busy_s = _sums(plan.ranks, own_s, plan.num_ranks)
    for array in (start_s, duration_s, local_s, busy_s, exposed_s):
        array.setflags(write=False)
    return Evaluation(
        start_s=start_s,
        duration_s=duration_s,
        local_s=local_s,
        busy_s=busy_s,
        exposed_s=exposed_s,
        makespan_s=makespan_s,
        total_compute_s=total_compute_s,
        lower_bound_s=lower_bound_s(plan.lengths, plan.num_ranks, cost_model),
        ring_bytes=ring_bytes,
    )


def lower_bound_s(lengths: NDArray[np.int64], num_ranks: int, cost_model: CostModel) -> float:
    """max(total compute / ranks, the longest time that a sequence needs at its best degree).

    At every degree the time of a sequence, exposed traffic included, grows with its length:
    only the longest one counts.
    """
    if len(lengths) == 0:
        return 0.0
    longest = float(lengths.max())
    degrees = np.arange(1, num_ranks + 1, dtype=np.float64)
    bandwidth = np.where(
        degrees <= cost_model.ranks_per_node,
        cost_model.intra_node_bytes_per_s,
        cost_model.inter_node_bytes_per_s,
    )
    transfer = 3 * (degrees - 1) / degrees * longest * cost_model.kv_bytes_per_token / bandwidth
    attention = cost_model.a * longest**2 / degrees
    own = cost_model.b * longest / degrees + np.maximum(attention, transfer) + cost_model.g
    return max(float(_compute_s(lengths, cost_model).sum()) / num_ranks, float(own.min()))


def _compute_s(lengths: NDArray[np.int64], cost_model: CostModel) -> NDArray[np.float64]:
    s = lengths.astype(np.float64)
    return cost_model.a * s * s + cost_model.b * s


def _sums(
    keys: NDArray[np.integer[Any]], values: NDArray[Any], num_keys: int
) -> NDArray[np.float64]:
    """Sum of the values of each key."""
    return np.bincount(keys, weights=values, minlength=num_keys).astype(np.float64, copy=False)


def _per_micro_batch(offsets: NDArray[np.int64], values: NDArray[Any]) -> NDArray[np.float64]:
    """Sums of the values that each micro-batch owns."""
    owner = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    return _sums(owner, values, len(offsets) - 1)


def _ring_times(
    plan: Plan, cost_model: CostModel, degrees: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """Time of each micro-batch without its locals, the exposed part of it, and bytes sent."""
    lengths = plan.lengths[plan.sequences]
    tokens = _per_micro_batch(plan.sequence_offsets, lengths)
    squares = _per_micro_batch(plan.sequence_offsets, lengths.astype(np.float64) ** 2)
    attention = cost_model.a * squares / degrees
    linear = cost_model.b * tokens / degrees
    bytes_per_rank = 3 * (degrees - 1) / degrees * tokens * cost_model.kv_bytes_per_token
    bandwidth = np.where(
        _in_one_node(plan, cost_model.ranks_per_node),
        cost_model.intra_node_bytes_per_s,
        cost_model.inter_node_bytes_per_s,
    )
    exposed = np.maximum(0.0, bytes_per_rank / bandwidth - attention)
    ring_s = attention + linear + exposed + cost_model.g
    return ring_s, exposed, float((bytes_per_rank * degrees).sum())


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
    seconds = _compute_s(plan.lengths[plan.local_sequences], cost_model)
    return _sums(members, seconds, len(keys))


def _starts(plan: Plan, duration_s: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
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
    return np.array(starts, dtype=np.float64), max(clocks)

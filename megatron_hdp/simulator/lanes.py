"""The bars of a plan's picture: what every rank does when, as flat arrays."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_hdp.planner import CostModel, Evaluation, Plan

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Lanes:
    """Bars of all ranks; entry ``i`` belongs to ``plan.ranks[i]`` and its micro-batch.

    A member first runs its part of the ring, from ``start_s`` to ``ring_end_s``, then its whole
    local sequences, until ``own_end_s``; then it waits for the slowest member.
    """

    rank: Int64Array
    micro_batch: Int64Array
    degree: Int64Array
    start_s: Float64Array
    ring_end_s: Float64Array
    own_end_s: Float64Array


def lanes_of(plan: Plan, evaluation: Evaluation, cost_model: CostModel) -> Lanes:
    """Lay out a plan's bars.

    Raises:
        ValueError: ``evaluation`` was not made from this plan with this cost model.
    """
    seconds = cost_model.a * plan.lengths.astype(np.float64) ** 2 + cost_model.b * plan.lengths
    if len(evaluation.start_s) != plan.num_micro_batches or not np.isclose(
        seconds.sum(), evaluation.total_compute_s, rtol=1e-6
    ):
        raise ValueError(
            f"the evaluation has {len(evaluation.start_s)} micro-batches and "
            f"{evaluation.total_compute_s:.6g} s of compute, the plan under this cost model "
            f"{plan.num_micro_batches} and {seconds.sum():.6g} s: pass the plan and the cost model "
            "that the evaluation was made with"
        )
    degrees = np.diff(plan.rank_offsets)
    micro_batch = np.repeat(np.arange(plan.num_micro_batches), degrees)
    local_s = _local_seconds(plan, micro_batch, seconds)
    slowest_local_s = np.zeros(plan.num_micro_batches)
    np.maximum.at(slowest_local_s, micro_batch, local_s)
    start_s = evaluation.start_s[micro_batch]
    ring_end_s = start_s + (evaluation.duration_s - slowest_local_s)[micro_batch]
    return Lanes(
        rank=plan.ranks.astype(np.int64),
        micro_batch=micro_batch,
        degree=degrees[micro_batch],
        start_s=start_s,
        ring_end_s=ring_end_s,
        own_end_s=ring_end_s + local_s,
    )


def _local_seconds(plan: Plan, micro_batch: Int64Array, seconds: Float64Array) -> Float64Array:
    """Return the time of local sequences for every entry of ``plan.ranks``."""
    total = np.zeros(len(plan.ranks))
    keys = micro_batch * plan.num_ranks + plan.ranks
    order = np.argsort(keys)
    owner = np.repeat(np.arange(plan.num_micro_batches), np.diff(plan.local_offsets))
    place = np.searchsorted(keys[order], owner * plan.num_ranks + plan.local_ranks)
    np.add.at(total, order[place], seconds[plan.local_sequences])
    return total

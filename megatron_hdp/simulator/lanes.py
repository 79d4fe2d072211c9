"""The bars of a plan's picture: what every rank does when, as flat arrays."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_hdp.planner import Evaluation, Plan

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


def lanes_of(plan: Plan, evaluation: Evaluation) -> Lanes:
    """Lay out a plan's bars.

    Raises:
        ValueError: ``evaluation`` was not made from this plan.
    """
    if len(evaluation.local_s) != len(plan.ranks):
        raise ValueError(
            f"the evaluation has times of {len(evaluation.local_s)} members of micro-batches, the "
            f"plan has {len(plan.ranks)}: pass the plan that the evaluation was made from"
        )
    degrees = np.diff(plan.rank_offsets)
    micro_batch = np.repeat(np.arange(plan.num_micro_batches), degrees)
    slowest_local_s = np.zeros(plan.num_micro_batches)
    np.maximum.at(slowest_local_s, micro_batch, evaluation.local_s)
    start_s = evaluation.start_s[micro_batch]
    ring_end_s = start_s + (evaluation.duration_s - slowest_local_s)[micro_batch]
    return Lanes(
        rank=plan.ranks.astype(np.int64),
        micro_batch=micro_batch,
        degree=degrees[micro_batch],
        start_s=start_s,
        ring_end_s=ring_end_s,
        own_end_s=ring_end_s + evaluation.local_s,
    )

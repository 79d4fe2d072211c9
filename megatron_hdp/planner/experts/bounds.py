"""What no plan can beat whose ranks share experts."""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from megatron_hdp.planner.bounds import own_times_s, speeds_of, total_compute_s
from megatron_hdp.planner.cost_model import CostModel


def lockstep_bound_s(
    lengths: NDArray[np.int64],
    num_ranks: int,
    cost_model: CostModel,
    expert_parallel_size: int,
) -> float:
    """No plan of ranks that share experts takes less than the greater of these two.

    1. Work. At position i a domain of E ranks with speeds v takes at least the dense time of each
       of its members, and x = ``b_experts`` x all its tokens / (E x the least v) on top. So the
       members' dense work at i is at most (sum of v) x (T(i) - x), and experts' work
       ``b_experts`` x tokens = E x (least v) x x at most (sum of v) x x. Together at most
       (sum of v) x T(i): summed over positions and domains, total compute is at most the sum of
       all speeds x the makespan.

    2. The longest sequence. On D ranks its members take their dense time as without experts
       (`own_times_s`), and one of the N / E domains has at least k = ceil(D E / N) of them, with
       1 / D of the sequence's tokens each, so that its experts take b_experts x s x k / (D E) on
       top, at the greatest speed. The least over D.

    Args:
        lengths: Tokens of each sequence.
        num_ranks: HDP ranks N.
        cost_model: With the ranks' speeds.
        expert_parallel_size: HDP ranks E of a domain.
    """
    if len(lengths) == 0:
        return 0.0
    speeds = speeds_of(cost_model, num_ranks)
    work_s = total_compute_s(lengths, cost_model) / float(speeds.sum())
    longest = int(lengths.max())
    own_s = own_times_s(longest, num_ranks, dataclasses.replace(cost_model, b_experts=0.0))
    degrees = np.arange(1, num_ranks + 1)
    beside = -(-degrees * expert_parallel_size // num_ranks)
    shared_s = cost_model.b_experts * longest * beside / (degrees * expert_parallel_size)
    return max(work_s, float((own_s + shared_s / speeds.max()).min()))

"""What a rank's share of a step has it compute, in the terms of the cost model."""

from __future__ import annotations

import numpy as np

from megatron_hdp.arrays import Float64Array
from megatron_hdp.data.steps.share import RankShare
from megatron_hdp.planner import CostModel
from megatron_hdp.planner.bounds import attention_s, block_s


def work_of(share: RankShare, cost_model: CostModel, num_stages: int = 1) -> Float64Array:
    """Return what one rank of speed 1 computes in a step.

    Args:
        share: of the rank.
        cost_model: the cost model.
        num_stages: pipeline stages of a rank.

    Returns:
        Seconds of attention with its blocks, seconds of what is linear in the length, number of
        micro-batches; shape (3,). ``g`` and traffic are not part of it.
    """
    slots = np.arange(share.num_slots)
    degrees = np.diff(share.ring_offsets)
    counts = np.diff(share.offsets)
    owners = np.repeat(slots, counts)
    is_sharded = np.arange(len(owners)) - share.offsets[owners] < share.num_sharded[owners]
    parts = np.where(is_sharded, degrees[owners], 1)
    attention = float((attention_s(share.lengths, cost_model) / parts).sum())
    linear = cost_model.linear_s_per_token * float((share.lengths / parts).sum())
    has_local = (degrees > 1) & (counts > share.num_sharded)
    blocks = int(degrees.sum() + has_local.sum())
    attention += blocks * block_s(cost_model, num_stages)
    return np.array([attention, linear, float(share.num_slots)])

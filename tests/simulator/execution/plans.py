"""Plans small enough to run by hand: one-token sequences, a second of `g` a time."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_hdp.planner import CostModel, Plan

COSTS = CostModel(a=0.0, b=0.0, kv_bytes_per_token=0.0, g=6.0)
"""2 seconds forward and 4 backward, whatever a micro-batch holds."""


def plan_of(
    rings: Sequence[Sequence[int]],
    lengths: Sequence[int] | None = None,
    ratios: Sequence[float] | None = None,
    **changes: Any,
) -> Plan:
    """A plan whose micro-batch m has sequence m on ring m."""
    count = len(rings)
    ranks = [rank for ring in rings for rank in ring]
    fields: dict[str, Any] = {
        "num_ranks": max(ranks) + 1,
        "tokens_per_rank": 10**6,
        "strategy": "naive",
        "lengths": lengths or [1] * count,
        "rank_offsets": np.cumsum([0, *map(len, rings)]),
        "ranks": ranks,
        "sequence_offsets": np.arange(count + 1),
        "sequences": np.arange(count),
        "local_offsets": np.zeros(count + 1),
        "local_sequences": [],
        "local_ranks": [],
        "offload_ratios": ratios or [0.0] * count,
    }
    return Plan(**(fields | changes))

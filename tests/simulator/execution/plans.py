"""Plans small enough to run by hand: one-token sequences, a second of `g` a time."""

from megatron_hdp.planner import CostModel
from tests.planner.problems import rings_of as plan_of

__all__ = ["COSTS", "plan_of"]

COSTS = CostModel(a=0.0, b=0.0, kv_bytes_per_token=0.0, g=6.0)
"""2 seconds forward and 4 backward, whatever a micro-batch holds."""

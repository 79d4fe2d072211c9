"""Plans a global batch: which HDP ranks form a ring for which sequences, in which order.

Design: `docs/design/planning.md`.
"""

from megatron_hdp.planner.bounds import compute_s, lower_bound_s
from megatron_hdp.planner.cost_model import LLAMA_7B, CostModel
from megatron_hdp.planner.evaluation import Evaluation, Figures, evaluate, figures, replay
from megatron_hdp.planner.make_plan import (
    STRATEGIES,
    make_plan,
    plan,
    tight_bound_of,
    tight_bound_s,
)
from megatron_hdp.planner.pipeline_bounds import pipeline_lower_bound_s
from megatron_hdp.planner.problem import Problem, told_as
from megatron_hdp.planner.slices import chunk_tokens, slice_tokens
from megatron_hdp.planner.types import MicroBatch, Plan, PlanError

__all__ = [
    "LLAMA_7B",
    "STRATEGIES",
    "CostModel",
    "Evaluation",
    "Figures",
    "MicroBatch",
    "Plan",
    "PlanError",
    "Problem",
    "chunk_tokens",
    "compute_s",
    "evaluate",
    "figures",
    "lower_bound_s",
    "make_plan",
    "pipeline_lower_bound_s",
    "plan",
    "replay",
    "slice_tokens",
    "tight_bound_of",
    "tight_bound_s",
    "told_as",
]

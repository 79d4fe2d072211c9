"""Experts across HDP ranks: what a plan takes whose neighbours wait for each other everywhere.

Design: `docs/design/moe.md`.
"""

from megatron_hdp.planner.bounds import lockstep_bound_s
from megatron_hdp.planner.experts.evaluation import (
    LockstepFigures,
    evaluation_of,
    exchanged_bytes_per_token,
    figures_in_lockstep,
)

__all__ = [
    "LockstepFigures",
    "evaluation_of",
    "exchanged_bytes_per_token",
    "figures_in_lockstep",
    "lockstep_bound_s",
]

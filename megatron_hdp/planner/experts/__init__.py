"""Experts across HDP ranks: what a plan takes whose neighbours wait for each other everywhere."""

from megatron_hdp.planner.bounds import lockstep_bound_s
from megatron_hdp.planner.experts.evaluation import LockstepFigures, figures_in_lockstep

__all__ = ["LockstepFigures", "figures_in_lockstep", "lockstep_bound_s"]

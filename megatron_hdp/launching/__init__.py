"""The agent of a node: starts its ranks, sees them end; the first node's names the job's epochs."""

from megatron_hdp.launching.agent import Agent, LaunchPlan, command_of

__all__ = ["Agent", "LaunchPlan", "command_of"]

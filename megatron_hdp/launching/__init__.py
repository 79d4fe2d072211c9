"""The agent of a node: starts its ranks, sees them end; the first node's names the job's epochs."""

from megatron_hdp.launching.agent import Agent
from megatron_hdp.launching.node_agent import NodeAgent
from megatron_hdp.launching.plan import LaunchPlan, command_of

__all__ = ["Agent", "LaunchPlan", "NodeAgent", "command_of"]

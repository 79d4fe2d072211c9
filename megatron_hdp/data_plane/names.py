"""What the actors of a plane are called, so that each finds the others."""

NAMESPACE = "megatron_hdp"
CONTROL = "control"
"""Concurrency group of those methods of a planner that wait for nobody: they always get through."""
PREFIX = "hdp-data-"
"""Of the names of planes, and of their folders on each node."""


def planner_of(plane: str) -> str:
    """Return the name of a plane's planner."""
    return f"{plane}-planner"


def constructor_of(plane: str, node: int) -> str:
    """Return the name of a node's constructor."""
    return f"{plane}-constructor-{node}"


def loader_of(plane: str, split: str, source: str, number: int) -> str:
    """Return the name of one of a source's loaders."""
    return f"{plane}-loader-{split}-{source}-{number}"

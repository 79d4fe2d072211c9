"""What the actors of a plane are called, so that each finds the others."""

import signal
from collections.abc import Sequence

NAMESPACE = "megatron_hdp"
END_SIGNAL = signal.SIGUSR2
"""By which a rank ends its node's part of a plane, as its death does."""
WARNINGS = {signal.SIGTERM, signal.SIGUSR1}
"""By which Slurm warns all processes of a job; ranks save then, and still want their data."""
CONTROL = "control"
"""Concurrency group of those methods of a planner that wait for nobody: they always get through."""


def planner_of(plane: str) -> str:
    """Return the name of a plane's planner."""
    return f"{plane}-planner"


def constructor_of(plane: str, node: int) -> str:
    """Return the name of a node's constructor."""
    return f"{plane}-constructor-{node}"


def spare_of(plane: str, number: int) -> str:
    """Return the name of a loader that was started before its source was known."""
    return f"{plane}-loader-{number}"


def loader_of(plane: str, split: str, sources: Sequence[str], number: int) -> str:
    """Return the name of one of a split's loaders; no two have the same number."""
    first, *others = sources
    label = f"{first}+{len(others)}" if others else first
    return f"{plane}-loader-{split}-{label}-{number}"

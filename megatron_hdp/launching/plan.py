"""What is started, where; the same for the agents of all nodes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_hdp.runtime.epochs import keys

LOOK_S = 0.5
"""How often an agent looks at what is a matter of time; all else it hears of."""
GRACE_S = 30.0
STOPPED_S = 10.0
KNOW_S = 5.0
"""How long ranks have to end for the same reason as one that knows that the job cannot continue."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@dataclass(frozen=True)
class LaunchPlan:
    """What is started, where."""

    command: tuple[str, ...]
    """Of one rank."""
    num_ranks: int
    """Of a node."""
    address: str
    """Where ranks, and agents of other nodes, find the store."""
    port: int
    """Where the store listens; 0: at a free one, for one node."""
    max_replacements: int
    """Processes that are started in the place of others, over the whole job."""
    num_nodes: int = 1
    node_rank: int = 0
    """Of this node; the first one's agent holds the store."""
    node_timeout_s: float = 10.0
    """After which a node that gives no sign of life is lost."""
    join_s: float = 600.0
    """How long nodes wait for each other at the start."""
    num_spares: int = 0
    """Processes of a node beyond those that train: ready to take the place of others."""

    @property
    def num_slots(self) -> int:
        """Processes of a node at a time."""
        return self.num_ranks + self.num_spares

    def environment(self) -> dict[str, str]:
        """What all ranks of this node find in theirs."""
        return {
            "GROUP_RANK": str(self.node_rank),
            keys.HOST: keys.own_host(),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }


def command_of(program: Sequence[str], is_module: bool) -> tuple[str, ...]:
    """What a rank runs: a module or a script, by this Python."""
    return (sys.executable, "-u", *(["-m"] if is_module else []), *program)


def say(line: str) -> None:
    """Prints a line of an agent's."""
    print(f"megatron-hdp launch: {line}", file=sys.stderr, flush=True)

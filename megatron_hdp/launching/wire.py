"""What the agents of nodes say to each other in the job's store: one declaration for both sides.

Each agent that comes for a node has the next *turn* of it, so that one that was given up is never
taken for the one that came after it. Beats are counted, not timed: clocks of hosts may differ.

- ``turns/N``: counts the agents that have come for node N; ``arrival/N/T`` says what they bring
- ``alive/N/T``: counts beats of the agent of a turn
- ``order/N/T/K`` (by the first node's agent): its K-th order (`Order`)
- ``told/N/T/K`` (by the other one): the K-th thing that it has seen (`Told`)
- ``bell``: counts what all of them have told, so that the first one looks at one number; they
  `keys.ring` then
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch.distributed as dist

from megatron_hdp.runtime.epochs import Message, keys

BELL = "bell"
BEATS = 10
"""In the time after which a silent node is given up."""
LEASE = 0.7
"""The share of that time after which an agent that reaches nobody has killed its own ranks: before
others go on without them."""
LAST = ("end", "give_up")
"""Orders behind which an agent gets no other."""


@dataclass(frozen=True)
class Arrival(Message):
    """What an agent brings."""

    host: str
    num_nodes: int
    num_ranks: int
    """Of its node, at a time."""
    num_spares: int = 0
    """Beside them."""


@dataclass(frozen=True)
class Order(Message):
    """What an agent is to do.

    - ``start``: a process, in a slot
    - ``kill``: one, in the middle of anything
    - ``signal``: send one to all
    - ``survive``: from now on the job survives the loss of ranks
    - ``end``: end all processes, then itself, with a code
    - ``give_up``: the same at once, because others go on without them
    """

    what: Literal["start", "kill", "signal", "survive", "end", "give_up"]
    member: int = -1
    slot: int = -1
    number: int = 0
    """The signal's, or the exit code."""
    environment: Mapping[str, str] = field(default_factory=dict)
    why: str = ""


@dataclass(frozen=True)
class Told(Message):
    """What an agent has seen: a process that ended, a signal to itself, or its own end."""

    what: Literal["ended", "signal", "bye"]
    member: int = -1
    number: int = 0
    """The process' exit code, or the signal's number."""


def ring(store: dist.Store) -> None:
    """Lets the first node's agent look at what was told."""
    store.add(BELL, 1)
    keys.ring(store)


def turns(node: int) -> str:
    """How many agents have come for a node."""
    return f"turns/{node}"


def arrival(node: int, turn: int) -> str:
    """What one of them brings."""
    return f"arrival/{node}/{turn}"


def alive(node: int, turn: int) -> str:
    """Its beats."""
    return f"alive/{node}/{turn}"


def order(node: int, turn: int, number: int) -> str:
    """An order to it."""
    return f"order/{node}/{turn}/{number}"


def told(node: int, turn: int, number: int) -> str:
    """What it has seen."""
    return f"told/{node}/{turn}/{number}"

"""What ranks and the agent say to each other in the job's store: one declaration for both.

- ``terms`` (by a rank): under which terms the job survives (`Terms`); before, a death ends it
- ``members/E`` (by the agent): the members of epoch E (`Epoch`), once
- ``news/E/M/0``, ``news/E/M/1`` (by the agent, to member M): ``join``: leave behind the step;
  ``over``: at once; (by member M, to itself): ``end``: listen no more
- ``over/E`` (by the agent): epoch E is over
- ``vote/E/M`` (by member M): what it has done when it left epoch E
- ``slow/E`` (by the first rank of epoch E): members that are too slow, with their speeds
- ``ready/M`` (by joiner M): it has built its model
- ``admitted/M`` (by the agent): the epoch that a joiner enters first
- ``rung`` (by all): something is there that the agent waits for, see `ring`
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from typing import Self

import torch.distributed as dist

MEMBER = "MEGATRON_HDP_MEMBER"
"""The environment's name for this process's number, which no other process of the job ever has."""
JOINS = "MEGATRON_HDP_JOINS"
"""And for the numbers of those that it builds its model with, if it comes later."""
PLACE = "MEGATRON_HDP_PLACE"
"""And for the rank that ran in its slot, on its GPU, when the job began; a spare's has none."""
HOST = "MEGATRON_HDP_HOST"
"""And for its host's name, to be told apart from others by."""
NODE_TIMEOUT = "MEGATRON_HDP_NODE_TIMEOUT"
"""And for the seconds after which a silent node is lost, where there is more than one."""
JOIN, OVER, END = b"join", b"over", b"end"
TERMS = "terms"
RUNG = "rung"


@dataclass(frozen=True)
class Message:
    """What one process leaves for another in the store."""

    def to_json(self) -> str:
        """As the store keeps it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes | str) -> Self:
        """The inverse of `to_json`."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Terms(Message):
    """Under which terms a job survives the death of ranks."""

    least: int
    """HDP ranks below which no step can run."""
    replica: int
    """Processes that come and leave together: those of an HDP rank, tensor-parallel times pipeline
    ranks, or those of all HDP ranks that share experts."""
    stages: int
    """Of the pipeline: a replica's processes stand apart by the ranks of a stage."""
    pause_s: float
    """How long the job waits for others while it has fewer ranks."""
    hdp_ranks: int = 1
    """That a replica consists of."""


@dataclass(frozen=True)
class Epoch(Message):
    """Who is in the job."""

    number: int
    members: tuple[int, ...]
    """By rank."""
    why: str = ""
    """What ended the one before, in words."""
    is_last: bool = False
    """Whether the members only save what they have and end: they are too few."""

    @classmethod
    def from_json(cls, text: bytes | str) -> Self:
        """The inverse of `to_json`."""
        found = json.loads(text)
        return cls(**{**found, "members": tuple(found["members"])})


def ring(store: dist.Store) -> None:
    """Wakes the agent, which waits for terms, votes, and joiners that are ready."""
    store.set(RUNG, b"1")


def members(epoch: int) -> str:
    """Where the members of an epoch stand."""
    return f"members/{epoch}"


def news(epoch: int, member: int, number: int) -> str:
    """Where the next word to a member of an epoch stands."""
    return f"news/{epoch}/{member}/{number}"


def over(epoch: int) -> str:
    """What is there once an epoch is over."""
    return f"over/{epoch}"


def vote(epoch: int, member: int) -> str:
    """What a member says when it leaves an epoch."""
    return f"vote/{epoch}/{member}"


def slow(epoch: int) -> str:
    """Who is too slow."""
    return f"slow/{epoch}"


def ready(member: int) -> str:
    """What a joiner sets."""
    return f"ready/{member}"


def admitted(member: int) -> str:
    """Which epoch a joiner enters."""
    return f"admitted/{member}"


def own_host() -> str:
    """This host's name, unless the environment gives it another one."""
    return os.environ.get(HOST) or socket.gethostname()


def node_timeout_s() -> float:
    """After which a silent node is lost; 0: there is one node."""
    return float(os.environ.get(NODE_TIMEOUT, 0))


def address_of_agent() -> tuple[str, int]:
    """Where the job's store listens.

    Raises:
        ValueError: this process was not started by ``megatron-hdp launch``.
    """
    if MEMBER not in os.environ:
        raise ValueError(
            f"--hdp-survive: found no {MEMBER} in the environment, expected a rank that "
            "megatron-hdp launch has started, whose agent outlives ranks: start the job by "
            "megatron-hdp launch --nproc-per-node 4 -m megatron_hdp.pretrain_gpt ..."
        )
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])

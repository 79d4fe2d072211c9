"""A node's agent: starts ranks, sees them end within milliseconds, starts others in their place.

It holds the job's store, and names epochs (`Coordinator`). Ranks that lose it end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType

import torch.distributed as dist

from megatron_hdp.exit_codes import ExitCode
from megatron_hdp.launching.coordinator import Coordinator
from megatron_hdp.launching.node_ranks import Ended, NodeRanks
from megatron_hdp.runtime.epochs import keys

_LOOK_S = 0.01
_GRACE_S = 30.0
_JOIN_STORE_S = 300.0
_STOPPED_S = 10.0
FINAL = (ExitCode.MISTAKE, ExitCode.BLAMES_ANOTHER)
"""Exit codes of a rank that knows that the job cannot continue."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@dataclass(frozen=True)
class LaunchPlan:
    """What is started, where."""

    command: tuple[str, ...]
    """Of one rank."""
    num_ranks: int
    address: str
    """Where ranks find the store."""
    port: int
    """Where the store listens; 0: at a free one."""
    max_replacements: int
    """Processes that are started in the place of others, over the whole job."""


class Agent:
    """That of a job of one node; see the module.

    Args:
        plan: what is started.
    """

    def __init__(self, plan: LaunchPlan) -> None:
        self._plan = plan
        self._store = dist.TCPStore(
            plan.address,
            plan.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=_JOIN_STORE_S),
        )
        world_size = plan.num_ranks
        environment = {
            "WORLD_SIZE": str(world_size),
            "GROUP_RANK": "0",
            "MASTER_ADDR": plan.address,
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_RUN_ID": uuid.uuid4().hex[:8],
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
        self._ranks = NodeRanks(plan.command, plan.num_ranks, environment)
        self._coordinator = Coordinator(self._store, range(world_size), _say)
        self._next_member = world_size
        self._num_replaced = 0
        self._asked_to_end = False

    def run(self) -> int:
        """Starts the ranks and returns the job's exit code once they have ended."""
        before = {number: signal.signal(number, self._pass_on) for number in _SIGNALS}
        try:
            for rank in range(self._plan.num_ranks):
                self._ranks.start(rank, rank, {"RANK": str(rank), keys.MEMBER: str(rank)})
            return self._watch()
        finally:
            self._ranks.end(_GRACE_S)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _watch(self) -> int:
        coordinator = self._coordinator
        worst = 0
        while True:
            survives = coordinator.begin()
            if survives:
                for member in self._ranks.give_up_stopped(_STOPPED_S):
                    _say(f"member {member} was stopped for {_STOPPED_S:.0f} s: it is given up")
            for ended in self._ranks.ended():
                is_member = coordinator.is_member(ended.member)
                for mate in coordinator.note(ended):
                    self._ranks.kill(mate)
                if ended.code and is_member:
                    worst = worst or _code_of(ended)
                    if not survives or ended.code in FINAL:
                        _say(f"{ended.words()}: the job ends")
                        return worst
            if coordinator.is_done():
                return ExitCode.DONE
            if not any(map(coordinator.is_member, coordinator.epoch.members)):
                return worst or ExitCode.FAILED
            if survives:
                coordinator.look()
                for member in coordinator.late():
                    _say(f"member {member} did not leave its epoch: it is given up")
                    self._ranks.kill(member)
                self._replace()
            time.sleep(_LOOK_S)

    def _replace(self) -> None:
        """Starts an HDP rank's processes where others have ended, if it may."""
        terms = self._coordinator.terms
        assert terms is not None
        wanted = self._plan.num_ranks // terms.replica
        while (
            self._coordinator.num_coming < wanted
            and not self._asked_to_end
            and not self._coordinator.epoch.is_last
            and self._num_replaced + terms.replica <= self._plan.max_replacements
        ):
            slots = self._ranks.free_slots()
            if len(slots) < terms.replica:
                return
            members = tuple(range(self._next_member, self._next_member + terms.replica))
            self._next_member += terms.replica
            self._num_replaced += terms.replica
            self._coordinator.joins(members)
            for place, (member, slot) in enumerate(zip(members, slots, strict=False)):
                own = {
                    "RANK": str(place),
                    keys.MEMBER: str(member),
                    keys.JOINS: json.dumps(members),
                }
                self._ranks.start(member, slot, own)
            _say(f"starts members {', '.join(map(str, members))} in the place of one that is lost")

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._asked_to_end = True
        self._ranks.send(number)


def _code_of(ended: Ended) -> int:
    return ended.code if ended.code > 0 else ExitCode.FAILED


def _say(line: str) -> None:
    print(f"megatron-hdp launch: {line}", file=sys.stderr, flush=True)


def command_of(program: Sequence[str], is_module: bool) -> tuple[str, ...]:
    """What a rank runs: a module or a script, by this Python."""
    return (sys.executable, "-u", *(["-m"] if is_module else []), *program)

"""The agent of a job's first node: starts ranks, sees them end within milliseconds, replaces them.

It holds the job's store, and names epochs (`Coordinator`). Ranks, and agents of other nodes, that
lose it end. Ranks of other nodes are started and ended through these nodes' agents.
"""

from __future__ import annotations

import json
import signal
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from types import FrameType

import torch.distributed as dist

from megatron_hdp.exit_codes import ExitCode
from megatron_hdp.launching.coordinator import Coordinator
from megatron_hdp.launching.node_ranks import Ended, NodeRanks
from megatron_hdp.launching.other_nodes import OtherNode, OtherNodes
from megatron_hdp.launching.plan import GRACE_S, KNOW_S, LOOK_S, SIGNALS, STOPPED_S, LaunchPlan, say
from megatron_hdp.launching.waking import Sleep
from megatron_hdp.launching.wire import BEATS, Arrival
from megatron_hdp.runtime.epochs import keys

_STORE_S = 300.0
_LOCAL = "127.0.0.1"  # it listens at all addresses
_FIRST = 0
FINAL = (ExitCode.MISTAKE, ExitCode.BLAMES_ANOTHER)
"""Exit codes of a rank that knows that the job cannot continue."""


class Agent:
    """That of a job's first node; see the module.

    Args:
        plan: what is started.

    Raises:
        ValueError: the store's port is in use.
    """

    def __init__(self, plan: LaunchPlan) -> None:
        self._plan = plan
        timeout = timedelta(seconds=_STORE_S)
        try:
            self._store = dist.TCPStore(
                _LOCAL, plan.port, is_master=True, wait_for_workers=False, timeout=timeout
            )
        except dist.DistNetworkError as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"found that port {plan.port} cannot be listened at ({reason}), expected a free "
                "one: give another --rdzv-endpoint"
            ) from error
        self._ear = dist.TCPStore(_LOCAL, self._store.port, is_master=False, timeout=timeout)
        is_one_node = plan.num_nodes == 1
        self._sleep = Sleep(LOOK_S if is_one_node else min(LOOK_S, plan.node_timeout_s / BEATS / 2))
        world_size = plan.num_nodes * plan.num_ranks
        self._environment = {
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": plan.address,
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_RUN_ID": uuid.uuid4().hex[:8],
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            keys.NODE_TIMEOUT: str(0 if is_one_node else plan.node_timeout_s),
        }
        self._ranks = NodeRanks(plan.command, plan.num_slots, plan.environment())
        arrival = Arrival(keys.own_host(), plan.num_nodes, plan.num_ranks, plan.num_spares)
        self._others = OtherNodes(self._store, arrival, plan.node_timeout_s, say)
        self._coordinator = Coordinator(self._store, range(world_size), say)
        self._next_member = world_size
        self._num_replaced = 0
        self._leaving: set[int] = set()
        self._asked_to_end = 0

    def run(self) -> int:
        """Starts the ranks and returns the job's exit code once they have ended."""
        before = {number: signal.signal(number, self._pass_on) for number in SIGNALS}
        code: int = ExitCode.FAILED
        with self._sleep:
            self._sleep.heed(self._store, self._ear)
            try:
                code = self._wait_for_nodes()
                if not code:
                    for rank in range(self._plan.num_nodes * self._plan.num_ranks):
                        node, slot = divmod(rank, self._plan.num_ranks)
                        self._start(rank, node, slot, {"RANK": str(rank)})
                    code = self._watch()
                return code
            finally:
                self._end(code)
                say(f"the job ends with exit code {int(code)}")
                for number, handler in before.items():
                    signal.signal(number, handler)

    def _wait_for_nodes(self) -> int:
        """Returns an exit code if the job does not begin, else 0."""
        deadline = time.monotonic() + self._plan.join_s
        while True:
            self._others.look()
            if self._others.misfit:
                say(self._others.misfit)
                return ExitCode.MISTAKE
            if not self._others.missing:
                return ExitCode.DONE
            if self._asked_to_end:
                return ExitCode.INTERRUPTED
            if time.monotonic() > deadline:
                say(
                    f"found no agent of {self._others.missing_words()} for {self._plan.join_s:g} "
                    f"s, expected {self._plan.num_nodes} nodes: start megatron-hdp launch on each"
                )
                return ExitCode.BLAMES_ANOTHER
            self._sleep()

    def _watch(self) -> int:
        coordinator = self._coordinator
        worst = 0
        while True:
            survives = coordinator.begin()
            if survives:
                for node in self._others.present.values():
                    node.survive()
                for member in self._ranks.give_up_stopped(STOPPED_S):
                    say(f"member {member} was stopped for {STOPPED_S:.0f} s: it is given up")
            for ended in self._ended():
                is_member = coordinator.is_member(ended.member)
                for mate in coordinator.note(ended):
                    self._kill(mate)
                if ended.code and is_member:
                    worst = worst or max(ended.code, 0)  # below 0: a signal's
                    if not survives or ended.code in FINAL:
                        say(f"{ended.words()}: the job ends")
                        self._dismiss(ended.words())
                        return worst or ExitCode.FAILED
            if coordinator.is_done():
                return ExitCode.DONE
            if coordinator.is_lost():
                say("nobody is left who has the weights: start the job again from its checkpoint")
                return worst or ExitCode.BLAMES_ANOTHER
            self._heed_signals(survives)
            if survives:
                coordinator.waits = not self._asked_to_end
                coordinator.look()
                for member in coordinator.retired:
                    self._retire(member)
                for member in coordinator.late():
                    say(f"member {member} held the others up for too long: it is given up")
                    self._kill(member)
                self._let_go()
                self._replace()
            self._sleep()

    def _dismiss(self, why: str) -> None:
        """Lets those leave that wait for one that is gone, once others have said why they end."""
        deadline = time.monotonic() + (KNOW_S if self._coordinator.terms is not None else 0.0)
        while time.monotonic() < deadline and (
            self._ranks.members or any(node.members for node in self._others.present.values())
        ):
            self._sleep()
            for _ in self._ended():
                pass
        self._coordinator.dismiss(why)

    def _ended(self) -> Iterator[Ended]:
        """Processes of all nodes that have ended; those of a lost node all at once."""
        yield from self._ranks.ended()
        for node in self._others.look():
            say(f"{node.why_lost}: all that runs there is given up")
            self._leaving.discard(node.number)
            yield from node.ended()
        for node in self._others.present.values():
            yield from node.ended()

    def _heed_signals(self, survives: bool) -> None:
        """Those that came to agents of other nodes, each of which has passed its own on."""
        for node in self._others.present.values():
            signals, node.signals = node.signals, []
            for number in signals:
                if number != signal.SIGTERM or not survives:
                    self._asked_to_end = number
                elif self._asked_to_end:
                    node.send(number)
                else:
                    self._drain(node)

    def _drain(self, node: OtherNode) -> None:
        """A node is to be left, as one does that is pre-empted: its ranks leave behind the step."""
        why = f"{node.name} leaves, which got SIGTERM"
        members = [one for one in node.members if self._coordinator.is_member(one)]
        if not self._coordinator.leave(members, why):
            say(f"{why}: too few HDP ranks would be left: the job ends, and saves first")
            self._pass_on(signal.SIGTERM, None)
            return
        say(why)
        self._leaving.add(node.number)
        for member in set(node.members) - set(members):
            node.kill(member)

    def _let_go(self) -> None:
        """Ends agents of nodes whose ranks have left."""
        for number in list(self._leaving):
            node = self._others.present[number]
            if not node.members:
                node.end(ExitCode.DONE, "this node has left the job, which goes on without it")
                self._others.drop(number)
                self._leaving.discard(number)

    def _replace(self) -> None:
        """Starts a replica's processes where others have ended, if it may."""
        terms = self._coordinator.terms
        assert terms is not None
        wanted = self._plan.num_nodes * self._plan.num_slots // terms.replica
        most = self._plan.max_replacements + self._plan.num_nodes * self._plan.num_spares
        while (
            self._coordinator.num_coming < wanted
            and not self._asked_to_end
            and not self._coordinator.epoch.is_last
            and self._num_replaced + terms.replica <= most
        ):
            free = {_FIRST: self._ranks.free_slots()}
            for other in self._others.present.values():
                if other.number not in self._leaving:
                    free[other.number] = other.free_slots()
            places = places_in(free, terms.replica, terms.stages, terms.hdp_ranks)
            if places is None:
                return
            members = tuple(range(self._next_member, self._next_member + terms.replica))
            self._next_member += terms.replica
            self._num_replaced += terms.replica
            self._coordinator.joins(members)
            for rank, (member, (node, slot)) in enumerate(zip(members, places, strict=True)):
                own = {"RANK": str(rank), keys.JOINS: json.dumps(members)}
                self._start(member, node, slot, own)
            say(f"starts members {', '.join(map(str, members))}, which wait for a place to be free")

    def _start(self, member: int, node: int, slot: int, environment: dict[str, str]) -> None:
        known = {**self._environment, **environment, keys.MEMBER: str(member)}
        if slot < self._plan.num_ranks:
            known[keys.PLACE] = str(node * self._plan.num_ranks + slot)
        where = self._ranks if node == _FIRST else self._others.present[node]
        where.start(member, slot, known)

    def _retire(self, member: int) -> None:
        self._ranks.retire(member)
        for node in self._others.present.values():
            node.retire(member)

    def _kill(self, member: int) -> None:
        self._ranks.kill(member)
        for node in self._others.present.values():
            node.kill(member)

    def _end(self, code: int) -> None:
        """Ends all processes of all nodes, and the other agents with the job's code."""
        nodes = [*self._others.present.values()]
        everywhere: list[NodeRanks | OtherNode] = [self._ranks, *nodes]
        for where in everywhere:
            for member in where.members:
                if not self._coordinator.is_member(member):
                    where.kill(member)  # it waits to join, and holds nothing
        for node in nodes:
            node.end(code)
        self._ranks.end(GRACE_S)
        deadline = time.monotonic() + GRACE_S + self._plan.node_timeout_s
        while time.monotonic() < deadline:
            self._others.look()
            if all(node.has_left for node in self._others.present.values()):
                return
            self._sleep()

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._asked_to_end = number
        self._ranks.send(number)


def places_in(
    free: Mapping[int, Sequence[int]], replica: int, stages: int, hdp_ranks: int = 1
) -> list[tuple[int, int]] | None:
    """Nodes and slots for a replica; None: too few are free.

    All are on one node, or those of each stage are, or at least those of a stage of each HDP rank.

    Args:
        free: slots by node.
        replica: its processes.
        stages: of the pipeline.
        hdp_ranks: of the replica.
    """
    for together in (replica, replica // stages, replica // stages // hdp_ranks):
        found = _in_blocks(free, replica // together, together)
        if found is not None:
            return found
    return None


def _in_blocks(
    free: Mapping[int, Sequence[int]], num_blocks: int, size: int
) -> list[tuple[int, int]] | None:
    """Places for so many blocks, each on one node."""
    left = {number: list(slots) for number, slots in free.items()}
    found: list[tuple[int, int]] = []
    for _ in range(num_blocks):
        number = next((one for one, slots in left.items() if len(slots) >= size), None)
        if number is None:
            return None
        found += [(number, slot) for slot in left[number][:size]]
        del left[number][:size]
    return found

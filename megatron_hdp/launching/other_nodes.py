"""The other nodes of a job as its first node's agent sees them: who is there, what it is told."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch.distributed as dist

from megatron_hdp.exit_codes import ExitCode
from megatron_hdp.launching import wire
from megatron_hdp.launching.node_ranks import Ended
from megatron_hdp.launching.wire import Arrival, Order, Told

_SHOWN = 8  # nodes that a message names


@dataclass
class OtherNode:
    """A node whose agent has come: processes are started there as `NodeRanks` starts them here.

    Args:
        store: of the job.
        number: the node's.
        turn: which agent of that node it is.
        arrival: what it brings.
        clock: seconds.

    Attributes:
        signals: that came to its agent and were not looked at yet.
        has_left: whether its agent has said that it ends.
        why_lost: in words; "": it is there.
    """

    store: dist.Store
    number: int
    turn: int
    arrival: Arrival
    clock: Callable[[], float] = time.monotonic
    signals: list[int] = field(default_factory=list)
    has_left: bool = False
    why_lost: str = ""
    _slots: dict[int, int] = field(default_factory=dict)
    _retired: set[int] = field(default_factory=set)
    _ended: list[Ended] = field(default_factory=list)
    _survives: bool = False
    _num_orders: int = 0
    _num_told: int = 0
    _beats: int = -1
    _felt_at: float = field(init=False)

    def __post_init__(self) -> None:
        """It has just come."""
        self._felt_at = self.clock()

    @property
    def name(self) -> str:
        """``node 1 (host b)``."""
        return f"node {self.number} (host {self.arrival.host})"

    @property
    def members(self) -> list[int]:
        """Processes that run there, as far as is known."""
        return list(self._slots)

    def start(self, member: int, slot: int, environment: Mapping[str, str]) -> None:
        """Starts a process in a free slot."""
        self._slots[member] = slot
        self._say(Order("start", member=member, slot=slot, environment=dict(environment)))

    def kill(self, member: int) -> None:
        """Kills one, in the middle of anything."""
        if member in self._slots:
            self._say(Order("kill", member=member))

    def send(self, number: int) -> None:
        """Sends a signal to all."""
        self._say(Order("signal", number=number))

    def survive(self) -> None:
        """Says, once, that the job survives the loss of ranks from now on."""
        if not self._survives:
            self._survives = True
            self._say(Order("survive"))

    def end(self, code: int, why: str = "") -> None:
        """Ends all processes and the agent."""
        self._say(Order("end", number=code, why=why))

    def free_slots(self) -> list[int]:
        """Slots without a process, in which others may start."""
        taken = set(self._slots.values()) | self._retired
        num_slots = self.arrival.num_ranks + self.arrival.num_spares
        return [slot for slot in range(num_slots) if slot not in taken]

    def retire(self, member: int) -> None:
        """As `NodeRanks` does."""
        if member in self._slots:
            self._retired.add(self._slots[member])

    def ended(self) -> list[Ended]:
        """Those that have ended since the latest call."""
        found, self._ended = self._ended, []
        return found

    def hear(self) -> None:
        """Takes note of all that its agent has told."""
        while self.store.check([key := wire.told(self.number, self.turn, self._num_told)]):
            self._num_told += 1
            told = Told.from_json(self.store.get(key))
            if told.what == "signal":
                self.signals.append(told.number)
            elif told.what == "bye":
                self.has_left = True
            elif self._slots.pop(told.member, None) is not None:
                self._ended.append(Ended(told.member, told.number))

    def feel(self) -> bool:
        """Whether its agent's heart has beaten since the latest call."""
        beats = self.store.add(wire.alive(self.number, self.turn), 0)
        if beats == self._beats:
            return False
        self._beats, self._felt_at = beats, self.clock()
        return True

    @property
    def silent_s(self) -> float:
        """For how long it has not."""
        return self.clock() - self._felt_at

    def give_up(self, why: str) -> None:
        """All that ran there counts as ended."""
        self.why_lost = why
        killed = -signal.SIGKILL
        self._ended += [Ended(member, killed, why) for member in self._slots]
        self._slots.clear()
        self._say(Order("give_up", why=why))

    def _say(self, order: Order) -> None:
        key = wire.order(self.number, self.turn, self._num_orders)
        self.store.set(key, order.to_json())
        self._num_orders += 1


class OtherNodes:
    """All nodes but the first.

    Args:
        store: of the job.
        own: what the first node's agent brings, as the others should.
        timeout_s: after which a silent node is lost.
        say: prints a line.
        clock: seconds.

    Attributes:
        present: by number, those whose agents live.
        misfit: why an agent does not belong to this job; "": all do.
    """

    def __init__(
        self,
        store: dist.Store,
        own: Arrival,
        timeout_s: float,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.present: dict[int, OtherNode] = {}
        self.misfit = ""
        self._store = store
        self._own = own
        self._timeout_s = timeout_s
        self._say = say
        self._clock = clock
        self._waiting: dict[int, OtherNode] = {}
        self._beats_of_taken: dict[int, int] = {}
        self._turns = dict.fromkeys(range(1, own.num_nodes), 0)
        self._rung = 0
        self._felt_at = clock()

    @property
    def missing(self) -> list[int]:
        """Nodes without an agent."""
        return [number for number in self._turns if number not in self.present]

    def look(self) -> list[OtherNode]:
        """Hears all that there is to hear; returns nodes that were lost."""
        if not self._turns:
            return []
        rung = self._store.add(wire.BELL, 0)
        if rung != self._rung:
            self._rung = rung
            for node in self.present.values():
                node.hear()
            for number in self._turns:
                self._hear_of(number)
        if self._clock() - self._felt_at < self._timeout_s / wire.BEATS / 2:
            return []
        self._felt_at = self._clock()
        return list(self._feel())

    def drop(self, number: int) -> None:
        """Of a node that has left in order: its agent may come again."""
        del self.present[number]
        self._admit(number)

    def missing_words(self) -> str:
        """``nodes 1, 3``."""
        numbers = self.missing
        more = f" and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else ""
        return f"node {', '.join(map(str, numbers[:_SHOWN]))}{more}"

    def _hear_of(self, number: int) -> None:
        """Of agents that have come for a node."""
        came = self._store.add(wire.turns(number), 0)
        while self._turns[number] < came:
            turn = self._turns[number] + 1
            if not self._store.check([wire.arrival(number, turn)]):
                return  # it says so next
            self._turns[number] = turn
            arrival = Arrival.from_json(self._store.get(wire.arrival(number, turn)))
            node = OtherNode(self._store, number, turn, arrival, self._clock)
            found = (arrival.num_nodes, arrival.num_ranks, arrival.num_spares)
            expected = (self._own.num_nodes, self._own.num_ranks, self._own.num_spares)
            if found != expected:
                self.misfit = (
                    f"found --nnodes {found[0]} --nproc-per-node {found[1]} --spares-per-node "
                    f"{found[2]} on {node.name}, expected {expected[0]}, {expected[1]} and "
                    f"{expected[2]} as on the first node: give all nodes the same"
                )
                node.end(ExitCode.MISTAKE, self.misfit)
                continue
            if number in self._waiting:  # a still later one has come
                self._waiting.pop(number).end(ExitCode.MISTAKE, _taken(node))
            self._waiting[number] = node
            self._beats_of_taken[number] = 0
            if number not in self.present:
                self._admit(number)

    def _admit(self, number: int) -> None:
        if number in self._waiting:
            node = self.present[number] = self._waiting.pop(number)
            node.feel()
            self._say(f"{node.name} is there")

    def _feel(self) -> Iterator[OtherNode]:
        """All hearts; yields nodes that were lost."""
        for number, node in list(self.present.items()):
            if node.feel():
                if number not in self._waiting:
                    continue
                self._beats_of_taken[number] += 1
                if self._beats_of_taken[number] > 2:  # it lives: the other one came by mistake
                    self._waiting.pop(number).end(ExitCode.MISTAKE, _taken(node))
            elif node.silent_s > self._timeout_s:
                why = f"{node.name} gave no sign of life for {self._timeout_s:g} s"
                node.give_up(why)
                del self.present[number]
                self._admit(number)
                yield node


def _taken(node: OtherNode) -> str:
    return (
        f"found --node-rank {node.number}, which the agent on host {node.arrival.host} has, that "
        "lives, expected one that is free: give each node its own"
    )

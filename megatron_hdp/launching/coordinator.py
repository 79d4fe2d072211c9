"""Who is in the job: one process decides, and writes each decision once.

It knows *replicas*, which come and leave as a whole: an HDP rank with all its tensor-parallel and
pipeline ranks, or all HDP ranks that share experts. Ranks are numbered as Megatron numbers them:
stage by stage, in each the replicas in order, in each of these the HDP ranks and their
tensor-parallel ranks. Survivors close gaps, joiners come last.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch.distributed as dist

from megatron_hdp.launching.node_ranks import Ended
from megatron_hdp.runtime.epochs import Epoch, Terms, keys

LEAVE_S = 60.0
"""How long a member may take to leave an epoch that is over, before it is given up."""
READY_S = 900.0
"""How long one that joins may take to build its model."""
TOGETHER_S = 5.0
"""How long one that is ready waits for others that may soon be, as those of a whole node."""

Replica: TypeAlias = tuple[int, ...]
"""Members, stage by stage."""


@dataclass
class Coordinator:
    """Names the members of each epoch of a job.

    Args:
        store: of the job.
        members: of the first epoch, by rank.
        say: prints a line.
        clock: seconds.

    Attributes:
        terms: under which the job survives; None: it does not.
        retired: members that left because they were slow.
        waits: whether a job with too few ranks waits for others; not once it was asked to end.
    """

    store: dist.Store
    members: Sequence[int]
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    terms: Terms | None = None
    retired: set[int] = field(init=False, default_factory=set)
    waits: bool = field(init=False, default=True)
    _most: int = field(init=False, default=0)
    _epoch: Epoch = field(init=False)
    _replicas: list[Replica] = field(init=False)
    _joiners: dict[Replica, float] = field(init=False, default_factory=dict)
    _leaving: dict[int, str] = field(init=False, default_factory=dict)
    _ready_at: float | None = field(init=False, default=None)
    _done: set[int] = field(init=False, default_factory=set)
    _asked: bool = field(init=False, default=False)
    _paused_at: float | None = field(init=False, default=None)
    _why: str = field(init=False, default="")
    _num_news: int = field(init=False, default=0)
    _is_over: bool = field(init=False, default=False)
    _left: Epoch | None = field(init=False, default=None)
    _named_at: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        """Names the first epoch."""
        self._epoch = Epoch(0, tuple(self.members))
        self._replicas = [(member,) for member in self.members]
        self.store.set(keys.members(0), self._epoch.to_json())

    @property
    def epoch(self) -> Epoch:
        """The newest."""
        return self._epoch

    def begin(self) -> bool:
        """Looks whether the ranks have said that they survive; True from then on."""
        if self.terms is None and self.store.check([keys.TERMS]):
            self.terms = Terms.from_json(self.store.get(keys.TERMS))
            self._replicas = replicas_of(self.members, self.terms.replica, self.terms.stages)
            self._most = len(self._replicas)
            if len(self._replicas) > 1:
                self.say(
                    f"the job survives the loss of ranks down to {self.terms.least} of its "
                    f"{self._num_hdp_ranks(self._replicas)} HDP ranks"
                )
        return self.terms is not None

    def is_member(self, member: int) -> bool:
        """Whether it is in the newest epoch, or would be if the job did not pause."""
        return any(member in one for one in self._replicas)

    def joins(self, replica: Replica) -> None:
        """Processes were started that will join together."""
        self._joiners[replica] = self.clock()

    def leave(self, members: Collection[int], why: str) -> bool:
        """Lets members leave behind the step that runs; False: too few would be left."""
        assert self.terms is not None
        leaving = {**self._leaving, **dict.fromkeys(members, why)}
        if self._num_hdp_ranks(self._staying(leaving)) < self.terms.least:
            return False
        self._leaving = leaving
        return True

    @property
    def num_coming(self) -> int:
        """Replicas that are in or will join."""
        return len(self._replicas) + len(self._joiners)

    def note(self, ended: Ended) -> list[int]:
        """Takes note of a process that has ended; returns mates of it to be ended with it."""
        member = ended.member
        for one in list(self._joiners):
            if member in one:
                del self._joiners[one]
                return [mate for mate in one if mate != member]
        if not self.is_member(member):
            return []
        if ended.code == 0:
            self._done.add(member)
            return []
        broken = next(one for one in self._replicas if member in one)
        self._replicas.remove(broken)
        for mate in broken:
            self._leaving.pop(mate, None)
        self._why = ended.words()
        return []

    def is_done(self) -> bool:
        """Whether every member has ended well, but those that died when others had ended."""
        left = [one for one in self._epoch.members if self.is_member(one)]
        return bool(left) and self._done >= set(left)

    def dismiss(self, why: str) -> None:
        """Lets all leave, whatever they wait for: the job ends, and no epoch follows for anybody.

        Not those of a last epoch, who save what they have.
        """
        if self.terms is not None and not self._epoch.is_last:
            number = self._epoch.number
            nobody = Epoch(number + 1, (), why, is_last=True)
            self.store.set(keys.members(nobody.number), nobody.to_json())
            self.store.set(keys.over(number), b"1")
            self._end_epoch()

    def is_lost(self) -> bool:
        """Whether nobody is left who has the state of the job."""
        return not self._replicas

    def late(self) -> list[int]:
        """Those that hold others up: they should have left an epoch, or be ready, by now."""
        begun_before = self.clock() - READY_S
        for replica, begun in self._joiners.items():
            if begun < begun_before and not self._is_ready(replica):
                return list(replica)
        if self._left is None or self.clock() - self._named_at < LEAVE_S:
            return []
        number, both = self._left.number, set(self._left.members) & set(self._epoch.members)
        found = [one for one in sorted(both) if not self.store.check([keys.vote(number, one)])]
        self._left = None
        return found

    def look(self) -> None:
        """Names a new epoch if it is time for one."""
        assert self.terms is not None
        ready = [one for one in self._joiners if self._is_ready(one)]
        if self._why:
            self._after_deaths(ready)
        elif not self._asked and not self._done:
            self._let_slow_leave(ready)
            if self._leaving or self._all_are(ready):
                self._tell(keys.JOIN)
                self._asked = True
        elif self._asked and self._have_all_left():
            staying = self._staying(self._leaving)
            ready = ready[: self._most - len(staying)]
            whys = [f"{self._num_hdp_ranks(ready)} HDP ranks join"] if ready else []
            whys += sorted(set(self._leaving.values()))
            self._leaving = {}
            self._name([*staying, *ready], ", ".join(whys), ready)

    def _staying(self, leaving: Container[int]) -> list[Replica]:
        return [one for one in self._replicas if not any(member in leaving for member in one)]

    def _let_slow_leave(self, ready: Sequence[Replica]) -> None:
        """Lets those leave that are too slow, as far as spares are ready in their place."""
        assert self.terms is not None
        key = keys.slow(self._epoch.number)
        if not ready or len(self._replicas) < self._most or not self.store.check([key]):
            return
        speeds = {int(one): speed for one, speed in json.loads(self.store.get(key)).items()}
        self.store.delete_key(key)
        slow = [one for one in self._replicas if any(member in speeds for member in one)]
        for one in slow[: len(ready)]:
            speed = min(speeds[member] for member in one if member in speeds)
            why = f"member {one[0]} leaves, which has {speed:.2g} of the others' speed"
            if self.leave(one, why):
                self.retired.update(one)

    def _all_are(self, ready: Sequence[Replica]) -> bool:
        """Whether who is ready need not wait for the others that will join."""
        room = self._most - len(self._replicas)
        ready = ready[:room]
        if not ready:
            self._ready_at = None
            return False
        if self._ready_at is None:
            self._ready_at = self.clock()
        waited_s = self.clock() - self._ready_at
        return len(ready) == min(len(self._joiners), room) or waited_s > TOGETHER_S

    def _after_deaths(self, ready: list[Replica]) -> None:
        assert self.terms is not None
        if self._done:
            return  # the others end, too
        self._end_epoch()
        left = self._num_hdp_ranks(self._replicas)
        enough = left >= self.terms.least
        joining = [] if enough else ready[: self._most - len(self._replicas)]
        if enough or left + self._num_hdp_ranks(ready) >= self.terms.least:
            self._name([*self._replicas, *joining], self._why, joining)
            return
        if not self.waits:
            why = (
                f"{self._why}; the job is asked to end, with {left} HDP ranks of "
                f"{self.terms.least} that the longest sequence needs"
            )
            self._name(self._replicas, why, [], is_last=True)
        elif self._paused_at is None:
            self._paused_at = self.clock()
            self.say(
                f"{left} HDP ranks are left, a step needs {self.terms.least}: "
                f"waits up to {self.terms.pause_s:.0f} s for others to join"
            )
        elif self.clock() - self._paused_at > self.terms.pause_s:
            why = (
                f"{self._why}; found {left} HDP ranks for "
                f"{self.terms.pause_s:.0f} s, expected {self.terms.least}, which the longest "
                "sequence needs"
            )
            self._name(self._replicas, why, [], is_last=True)

    def _is_ready(self, replica: Replica) -> bool:
        return all(self.store.check([keys.ready(one)]) for one in replica)

    def _have_all_left(self) -> bool:
        number = self._epoch.number
        return all(self.store.check([keys.vote(number, one)]) for one in self._epoch.members)

    def _end_epoch(self) -> None:
        """Lets all of its members leave at once, whatever they wait for."""
        if not self._is_over:
            self._is_over = True
            self._tell(keys.OVER)

    def _tell(self, word: bytes) -> None:
        epoch = self._epoch
        found = [keys.news(epoch.number, one, self._num_news) for one in epoch.members]
        self.store.multi_set(found, [word] * len(found))
        self._num_news += 1

    def _name(
        self, replicas: list[Replica], why: str, joining: list[Replica], is_last: bool = False
    ) -> None:
        assert self.terms is not None
        before = self._epoch
        found = Epoch(before.number + 1, by_rank(replicas, self.terms.stages), why, is_last)
        self.store.set(keys.members(found.number), found.to_json())
        self.store.set(keys.over(before.number), b"1")
        self._end_epoch()
        for one in joining:
            del self._joiners[one]
        self._ready_at = None
        for member in (member for one in joining for member in one):
            self.store.set(keys.admitted(member), str(found.number))
        self._epoch, self._replicas = found, list(replicas)
        self._left, self._named_at = before, self.clock()
        self._asked = self._is_over = False
        self._paused_at, self._why, self._num_news = None, "", 0
        self.say(f"epoch {found.number}: {self._num_hdp_ranks(replicas)} HDP ranks ({why})")

    def _num_hdp_ranks(self, replicas: Sequence[Replica]) -> int:
        assert self.terms is not None
        return len(replicas) * self.terms.hdp_ranks


def replicas_of(members: Sequence[int], replica: int, stages: int) -> list[Replica]:
    """The replicas of members in the order of their ranks."""
    tensor, per_stage = replica // stages, len(members) // stages
    return [
        tuple(
            members[stage * per_stage + number * tensor + i]
            for stage in range(stages)
            for i in range(tensor)
        )
        for number in range(len(members) // replica)
    ]


def by_rank(replicas: Sequence[Replica], stages: int) -> tuple[int, ...]:
    """The inverse of `replicas_of`."""
    return tuple(
        member
        for stage in range(stages)
        for one in replicas
        for member in one[stage * len(one) // stages : (stage + 1) * len(one) // stages]
    )

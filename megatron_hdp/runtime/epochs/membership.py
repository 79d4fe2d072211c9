"""A process's part in the epochs of its job: it hears who is in, and votes when it leaves one."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_hdp.exit_codes import ExitCode
from megatron_hdp.runtime.epochs import keys, nccl
from megatron_hdp.runtime.epochs.keys import Epoch, Terms
from megatron_hdp.runtime.epochs.sockets import call_listeners, open_sockets, shut_connections

_LOOK_S = 0.01
_LONGEST_LOOK_S = 0.1
_LISTEN = timedelta(days=1)  # the store prints a line each time that it is over


class NotNamedError(RuntimeError):
    """The agent has named an epoch without this process, which may only end."""


class EpochOverError(RuntimeError):
    """What was heard of others does not count: their waits, or this process's, were broken."""


class Membership:
    """This process in its job, under the number that the agent gave it.

    A thread listens to the agent. When the epoch ends because a member died, it ends all waits of
    this process: every communication raises. If the agent cannot be reached, it ends the process,
    which could not know any more whether it is in the job.

    Args:
        address: host and port of the job's store.
        member: this process's number.
        timeout_s: how long members may take to find together.
        break_waits: ends all waits of this process for others; by default it aborts NCCL's
            communicators, and then shuts the process's connections.

    Attributes:
        member: this process's number.
        is_over: set once the epoch is over.
        leaves_next: whether the epoch ends behind the step that runs.
    """

    def __init__(
        self,
        address: tuple[str, int],
        member: int,
        timeout_s: float,
        break_waits: Callable[[], None] | None = None,
    ) -> None:
        self.member = member
        self.is_over = threading.Event()
        self.leaves_next = False
        self._address = address
        self._timeout_s = timeout_s
        before = open_sockets()
        self._store = self._connect()
        self._ear = self._connect()
        self._spared = open_sockets() - before
        self._communicators = nccl.Communicators()
        self._break_waits = break_waits or self._end_waits
        self._others: set[str] = set()  # sockets that were not made for the epoch, or are called
        self._num_members = 0  # that it may listen for
        self._before_breaking: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._epoch: Epoch | None = None
        self._awaits: str | None = None
        self._ends = False
        self._thread = threading.Thread(target=self._listen, name="epochs", daemon=True)
        self._thread.start()

    @classmethod
    def of_environment(cls, timeout_s: float) -> Membership:
        """That of a process which the agent has started.

        Raises:
            ValueError: it has not.
        """
        address = keys.address_of_agent()
        return cls(address, int(os.environ[keys.MEMBER]), timeout_s)

    @property
    def joins_with(self) -> tuple[int, ...]:
        """Those that this process builds its model with, if it was not there from the start."""
        return tuple(json.loads(os.environ.get(keys.JOINS, "[]")))

    @property
    def is_in_epoch(self) -> bool:
        """Whether it has entered one that it has not left."""
        return self._epoch is not None

    def store_of_joiners(self) -> dist.Store:
        """Where those meet that build their model together before they join."""
        return dist.PrefixStore(f"alone/{self.joins_with[0]}", self._connect())

    def offer(self, terms: Terms) -> None:
        """Says that the job survives from now on, and how; its first groups are made by then."""
        self.has_met()
        self._store.set(keys.TERMS, terms.to_json())
        keys.ring(self._store)

    def first(self) -> Epoch:
        """The epoch that this process enters first; a joiner says that it is ready, and waits."""
        number = 0
        if self.joins_with:
            self._store.set(keys.ready(self.member), b"1")
            keys.ring(self._store)
            self._wait(keys.admitted(self.member))
            number = int(self._store.get(keys.admitted(self.member)))
        return self._named(number)

    def enter(self, epoch: Epoch, before_breaking: Callable[[], None]) -> dist.Store:
        """Begins to listen to the end of an epoch; returns the store in which its groups meet.

        Args:
            epoch: the one.
            before_breaking: called in another thread before waits are broken.
        """
        with self._lock:
            self.is_over.clear()
            self.leaves_next = False
            self._before_breaking = before_breaking
            self._epoch = epoch
            self._others, self._num_members = open_sockets(), len(epoch.members)
        # its own connection: whoever waits there for a dead member is let go, too
        return dist.PrefixStore(f"groups/{epoch.number}", self._connect())

    def has_met(self) -> None:
        """The epoch's groups are made: this process listens for no other member any more."""
        self._num_members = 0

    def require_ongoing(self) -> None:
        """Asks behind a wait for others whether what it gave counts.

        On GPUs a wait that is broken ends without an error, see `nccl`. Whoever finds the epoch
        ongoing behind a wait knows that nothing was broken before the wait had ended.

        Raises:
            EpochOverError: it does not.
        """
        if self.is_over.is_set():
            raise EpochOverError("the epoch is over: what this rank has heard of others is void")

    def name_slow(self, speeds: Mapping[int, float]) -> None:
        """Names members that are too slow, with their speeds: the agent may replace them."""
        epoch = self._epoch
        if epoch is not None:
            self._store.set(keys.slow(epoch.number), json.dumps(speeds))

    def leave(self, vote: Mapping[str, Any]) -> None:
        """Says what this process has done in its epoch.

        If that is over, its waits are broken for the last time: the listening thread may be late,
        and what still waits in another thread would hold up the end of its group.
        """
        with self._lock:
            epoch, self._epoch = self._epoch, None
            if self.is_over.is_set():
                self._break_waits()
        assert epoch is not None, "it is in no epoch"
        self._store.set(keys.vote(epoch.number, self.member), json.dumps(vote))
        keys.ring(self._store)

    def settled(self, epoch: Epoch) -> tuple[Epoch, dict[int, dict[str, Any]]]:
        """The epoch behind one that this process has left, and what members of that one voted.

        All that are in both have; a vote of one that died may be there, too. Who acted on it has
        seen it, so it stays seen by all.

        Raises:
            NotNamedError: the newest epoch is without this process.
        """
        number = epoch.number + 1
        while True:
            following = self._named(number)
            votes = self._votes(epoch, following)
            if votes is not None:
                return following, votes
            number = following.number + 1

    def _votes(self, epoch: Epoch, following: Epoch) -> dict[int, dict[str, Any]] | None:
        """None: who was to vote may have died, for the following epoch is over by now."""
        found = {}
        for one in epoch.members:
            key, over = keys.vote(epoch.number, one), keys.over(following.number)
            while one in following.members and not self._store.check([key]):
                if self._store.check([over]):
                    return None
                time.sleep(_LOOK_S)
            if self._store.check([key]):
                found[one] = json.loads(self._store.get(key))
        return found

    def close(self) -> None:
        """Listens no more.

        The thread has ended by then: one that came out of its wait while the interpreter ends would
        abort the process.
        """
        self._ends = True
        if self._awaits is not None:
            with suppress(dist.DistError):  # the agent is gone, and so is its wait
                self._store.set(self._awaits, keys.END)
        self._thread.join(self._timeout_s)

    def _connect(self) -> dist.TCPStore:
        host, port = self._address
        timeout = timedelta(seconds=self._timeout_s)
        return dist.TCPStore(host, port, is_master=False, timeout=timeout)

    def _named(self, number: int) -> Epoch:
        while True:
            self._wait(keys.members(number))
            if not self._store.check([keys.over(number)]):
                break
            number += 1
        found = Epoch.from_json(self._store.get(keys.members(number)))
        if self.member not in found.members:
            raise NotNamedError(
                f"member {self.member} is not in the job any more ({found.why}): it writes nothing "
                "and ends"
            )
        return found

    def _wait(self, key: str) -> None:
        """As long as the agent likes, while it lives: the listening thread knows."""
        pause_s = _LOOK_S
        while not self._store.check([key]):
            time.sleep(pause_s)
            pause_s = min(1.01 * pause_s, _LONGEST_LOOK_S)  # a spare waits for hours

    def _listen(self) -> None:
        heard: tuple[int, int] = (-1, 0)
        while not self._ends:
            epoch = self._epoch
            if epoch is None:
                time.sleep(_LOOK_S)
                continue
            if self.is_over.is_set():
                self._break(epoch)
                time.sleep(_LOOK_S)
                continue
            if heard[0] != epoch.number:
                heard = epoch.number, 0
            self._awaits = key = keys.news(epoch.number, self.member, heard[1])
            if self._ends:
                return  # `close` may have looked before
            try:
                self._ear.wait([key], _LISTEN)
                word = self._ear.get(key)
            except dist.DistNetworkError:
                self._end_process()
                return
            except dist.DistError:
                continue  # no news
            heard = heard[0], heard[1] + 1
            self._hear(epoch, word)

    def _hear(self, epoch: Epoch, word: bytes) -> None:
        with self._lock:
            if self._epoch is not epoch or word == keys.END:
                return  # it has left meanwhile
            if word == keys.JOIN:
                self.leaves_next = True
                return
            self.is_over.set()
            self._before_breaking()

    def _break(self, epoch: Epoch) -> None:
        """Again and again until it is left: the main thread may only begin to connect."""
        with self._lock:
            if self._epoch is epoch:
                self._break_waits()

    def _end_process(self) -> None:
        if self._ends:
            return
        os.write(2, b"megatron_hdp: the job's agent cannot be reached: this rank ends\n")
        os._exit(ExitCode.FAILED)  # the job may go on without it

    def _end_waits(self) -> None:
        """NCCL's own connections are among those that are shut: communicators end before."""
        self._communicators.abort()
        with suppress(OSError):
            if self._num_members:
                self._others |= call_listeners(self._others, self._num_members)
            shut_connections(self._spared)

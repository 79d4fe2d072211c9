"""The agent of a node that is not the first: does what that one's orders, and tells what it sees.

It lives on a *lease*: each of its beats that the job's store has taken lets its ranks live for a
while. When it reaches nobody, because the first node, the network or this host stood still, it
kills them, before the others go on without them.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta
from types import FrameType

import torch.distributed as dist

from megatron_hdp.exit_codes import ExitCode
from megatron_hdp.launching import wire
from megatron_hdp.launching.node_ranks import NodeRanks
from megatron_hdp.launching.plan import GRACE_S, LOOK_S, SIGNALS, STOPPED_S, LaunchPlan, say
from megatron_hdp.launching.waking import Sleep
from megatron_hdp.launching.wire import Arrival, Order, Told
from megatron_hdp.runtime.epochs import keys

_LISTEN = timedelta(days=1)  # the store prints a line each time that it is over
_TRY_S = 0.2
_CONNECT_S = 2.0
_STORE_S = 60.0
_KILLED_S = 5.0
_LAST_S = 2.0
_GONE = "the first node's agent cannot be reached"


class NodeAgent:
    """That of one node; see the module.

    Args:
        plan: what is started.
    """

    def __init__(self, plan: LaunchPlan) -> None:
        self._plan = plan
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._sleep = Sleep(LOOK_S)
        self._survives = False
        self._ends = threading.Event()
        self._fencing = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._num_told = 0
        self._renewed_at = time.monotonic()

    def run(self) -> int:
        """Does what it is told, and returns the job's exit code once that has ended."""
        before = {number: signal.signal(number, self._note) for number in SIGNALS}
        try:
            with self._sleep:
                return self._take_part()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _take_part(self) -> int:
        plan = self._plan
        if not self._is_found():
            return ExitCode.BLAMES_ANOTHER if self._signals.empty() else ExitCode.INTERRUPTED
        self._ranks = NodeRanks(plan.command, plan.num_slots, plan.environment())
        try:
            self._arrive()
            return self._obey()
        except dist.DistError:
            return self._is_fenced(_GONE)
        finally:
            self._ends.set()
            self._ranks.end(GRACE_S)
            for thread in self._threads:  # one that the store lets go while Python ends aborts
                thread.join(_LAST_S)

    def _is_found(self) -> bool:
        """Waits for the first node's agent."""
        plan = self._plan
        deadline = time.monotonic() + plan.join_s
        while time.monotonic() < deadline and self._signals.empty():
            with suppress(OSError):
                socket.create_connection((plan.address, plan.port), _CONNECT_S).close()
                return True
            time.sleep(_TRY_S)
        if self._signals.empty():
            say(
                f"found nobody at {plan.address}:{plan.port} for {plan.join_s:g} s, expected the "
                "agent of node rank 0: start it there, or give the right --rdzv-endpoint"
            )
        return False

    def _connect(self) -> dist.TCPStore:
        plan, timeout = self._plan, timedelta(seconds=_STORE_S)
        return dist.TCPStore(plan.address, plan.port, is_master=False, timeout=timeout)

    def _arrive(self) -> None:
        plan = self._plan
        self._store = self._connect()
        self._turn = self._store.add(wire.turns(plan.node_rank), 1)
        arrival = Arrival(keys.own_host(), plan.num_nodes, plan.num_ranks, plan.num_spares)
        self._store.set(wire.arrival(plan.node_rank, self._turn), arrival.to_json())
        wire.ring(self._store)
        self._renewed_at = time.monotonic()
        for work, arguments in (
            (self._beat, (self._connect(),)),
            (self._listen, (self._connect(),)),
            (self._watch_lease, ()),
        ):
            thread = threading.Thread(target=work, args=arguments, name="node-agent", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _obey(self) -> int:
        while True:
            while not self._orders.empty():
                order = self._orders.get()
                if order.what == "give_up":
                    return self._is_fenced(order.why)
                if order.what == "end":
                    if order.why:
                        say(order.why)
                    self._ranks.end(GRACE_S)
                    self._ends.set()  # behind its farewell the store may be gone
                    self._tell(Told("bye"))
                    return order.number
                self._do(order)
            while not self._signals.empty():
                number = self._signals.get()
                if number != signal.SIGTERM or not self._survives:
                    self._ranks.send(number)
                self._tell(Told("signal", number=number))
            if self._survives:
                for member in self._ranks.give_up_stopped(STOPPED_S):
                    say(f"member {member} was stopped for {STOPPED_S:.0f} s: it is given up")
            for ended in self._ranks.ended():
                self._tell(Told("ended", ended.member, ended.code))
            self._sleep()

    def _do(self, order: Order) -> None:
        if order.what == "start":
            self._ranks.start(order.member, order.slot, order.environment)
        elif order.what == "kill":
            self._ranks.kill(order.member)
        elif order.what == "signal":
            self._ranks.send(order.number)
        else:
            self._survives = True

    def _tell(self, told: Told) -> None:
        if self._fencing.locked():
            return  # what ends by that is no news
        key = wire.told(self._plan.node_rank, self._turn, self._num_told)
        self._store.set(key, told.to_json())
        wire.ring(self._store)
        self._num_told += 1

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signals.put(number)

    def _beat(self, store: dist.TCPStore) -> None:
        key = wire.alive(self._plan.node_rank, self._turn)
        while not self._ends.is_set():
            begun = time.monotonic()  # before it, as the other side counts from later on
            try:
                store.add(key, 1)
            except dist.DistError:
                self._end_process(_GONE)
                return
            self._renewed_at = begun
            self._ends.wait(self._plan.node_timeout_s / wire.BEATS)

    def _listen(self, store: dist.TCPStore) -> None:
        number = 0
        while not self._ends.is_set():
            key = wire.order(self._plan.node_rank, self._turn, number)
            try:
                store.wait([key], _LISTEN)
                order = Order.from_json(store.get(key))
            except dist.DistNetworkError:
                self._end_process(_GONE)
                return
            except dist.DistError:
                continue  # no order
            self._orders.put(order)
            self._sleep.end()
            if order.what in wire.LAST:
                return
            number += 1

    def _watch_lease(self) -> None:
        left_s = lease_s = wire.LEASE * self._plan.node_timeout_s
        while not self._ends.wait(left_s):
            silent_s = time.monotonic() - self._renewed_at
            left_s = lease_s - silent_s
            if left_s <= 0:
                self._end_process(f"the first node's agent did not answer for {silent_s:.0f} s")

    def _end_process(self, why: str) -> None:
        """From another thread, whatever the main one waits for."""
        if not self._ends.is_set():
            code = self._is_fenced(why)
            os._exit(code)

    def _is_fenced(self, why: str) -> int:
        self._fencing.acquire()  # for good: one thread says it, and ends this process
        self._ranks.kill_all(_KILLED_S)
        say(f"{why}: this node's ranks were killed, and write nothing more")
        return ExitCode.BLAMES_ANOTHER

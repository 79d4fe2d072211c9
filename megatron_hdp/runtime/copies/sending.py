"""A thread that takes snapshots of a shard and sends them to the neighbour, beside the step."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from megatron_hdp.runtime.copies.snapshots import Shelf, Snapshot, bytes_of
from megatron_hdp.runtime.copies.wire import Address, connect, give_way, receive, send, shut

_LOOK_S = 0.5
_MOST_PAUSE_S = 5.0

Read = Callable[[Snapshot], None]


class Sender:
    """One version after another: read it from the device, send it, hear that it is kept.

    Args:
        shelf: where own versions lie.
        read: fills a snapshot with the state as it is now; returns when it is in host memory.
        keeper: where the neighbour listens; None: nobody keeps a copy.
        timeout_s: the longest that reading may take, or the neighbour be silent.

    Attributes:
        complete: newest version that is whole here and at the neighbour; -1: none.
        trouble: why the neighbour does not have the newest version yet, or None.
    """

    def __init__(self, shelf: Shelf, read: Read, keeper: Address | None, timeout_s: float) -> None:
        self._shelf = shelf
        self._read = read
        self._keeper = keeper
        self._timeout_s = timeout_s
        self._connection: socket.socket | None = None
        self._changed = threading.Condition()
        self._closing = False
        self._to_read: Snapshot | None = None
        self._keep = -1
        self._error: Exception | None = None
        self.complete = -1
        self.trouble: str | None = None
        self._thread = threading.Thread(target=self._run, name="copies-send", daemon=True)
        self._thread.start()

    def begin(self, version: int, keep: int, facts: dict[str, Any]) -> None:
        """Begins with a version; nothing may change the state before `wait_read` has returned."""
        with self._changed:
            self._keep = keep
            self._to_read = self._shelf.begin(version, keep, facts)
            self._changed.notify_all()

    def wait_read(self) -> None:
        """Waits until the version that `begin` named is in host memory.

        Raises:
            TimeoutError: it takes longer than `timeout_s`.
        """
        self._wait(lambda: self._to_read is None, "reading the optimizer's shard")

    def wait_complete(self, version: int) -> None:
        """Waits until this version is at the neighbour.

        Raises:
            TimeoutError: it takes longer than `timeout_s`.
        """
        self._wait(lambda: self.complete >= version, f"version {version} to be at the neighbour")

    def close(self) -> None:
        """Gives up what is under way; returns in bounded time."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._connection is not None:
            shut(self._connection)
        self._thread.join(self._timeout_s)

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self._timeout_s
        with self._changed:
            while not done():
                if self._error is not None:
                    raise self._error
                if time.monotonic() > deadline:
                    why = f": {self.trouble}" if self.trouble else ""
                    raise TimeoutError(f"waited {self._timeout_s:g} s for {what}{why}")
                self._changed.wait(min(_LOOK_S, self._timeout_s))

    def _run(self) -> None:
        give_way()
        while True:
            with self._changed:
                while self._to_read is None and not self._closing:
                    self._changed.wait(_LOOK_S)
                snapshot = self._to_read
            if self._closing or snapshot is None:
                return
            try:
                self._read(snapshot)
            except Exception as error:  # told to whoever waits for the snapshot
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            snapshot.is_whole = True
            with self._changed:
                self._to_read = None
                self._changed.notify_all()
            if not self._sent(snapshot):
                return
            with self._changed:
                self.complete, self.trouble = snapshot.version, None
                self._changed.notify_all()

    def _sent(self, snapshot: Snapshot) -> bool:
        """Sends it until the neighbour has it; False: given up because of `close`."""
        pause_s = 0.1
        while self._keeper is not None and not self._closing:
            try:
                self._send(snapshot, self._keeper)
                return True
            except OSError as error:
                self.trouble = (
                    f"version {snapshot.version} has not reached the neighbour at "
                    f"{self._keeper.host}:{self._keeper.port} ({error})"
                )
                if self._connection is not None:
                    shut(self._connection)
                self._connection = None
            with self._changed:
                if not self._closing:
                    self._changed.wait(pause_s)
            pause_s = min(2 * pause_s, _MOST_PAUSE_S)
        return self._keeper is None

    def _send(self, snapshot: Snapshot, keeper: Address) -> None:
        if self._connection is None:
            self._connection = connect(keeper, "keep", self._timeout_s)
            layout = self._shelf.layout.to_json()
            send(self._connection, {"owner": self._shelf.owner, "layout": layout})
        header = {"version": snapshot.version, "keep": self._keep, "facts": snapshot.facts}
        send(self._connection, header, bytes_of(snapshot.values))
        kept = receive(self._connection).get("kept")
        if kept != snapshot.version:
            raise OSError(f"the neighbour kept version {kept}")

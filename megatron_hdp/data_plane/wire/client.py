"""Asks the node's server; waits while that is restarted, and says so when it does not come back."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from megatron_hdp.data_plane.wire.protocol import (
    DataPlaneLost,
    Message,
    ProtocolError,
    answer_in,
    receive,
    require_same_user,
    send,
)

_RETRY_S = 0.05
_CLOSE_S = 1.0


class NodeClient:
    """One rank's connection to the server of its node, for one request at a time.

    Every request is one that may be asked twice: when the server has gone and come back, the client
    says hello again and asks again.
    """

    def __init__(
        self,
        path: Path,
        *,
        hello: Message | None = None,
        why_lost: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Set whom to ask; `open` connects.

        Args:
            path: of the server's socket.
            hello: the first request of every connection, the one after a restart too.
            why_lost: says why a server that does not listen will never come back; None: it may.
        """
        self.path = path
        self._hello = hello
        self._why_lost = why_lost
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._is_closed = False
        self.greeting: Message = {}
        """The server's answer to the latest hello."""

    def open(self, timeout_s: float) -> None:
        """Connect; wait until the server listens.

        Args:
            timeout_s: within which it must listen, and answer the hello.

        Raises:
            DataPlaneLost: it did not listen or answer in time.
            ValueError: it refuses the hello.
        """
        begun = time.monotonic()
        self._connect("the first connection", begun, begun + timeout_s)

    def call(self, request: Message, timeout_s: float) -> Message:
        """Return the server's answer.

        Args:
            request: what is asked.
            timeout_s: the longest that this takes, a restart of the server included.

        Raises:
            DataPlaneLost: no answer in time.
            ValueError: a user's mistake, in the server's words.
        """
        begun = time.monotonic()
        deadline = begun + timeout_s
        what = _name(request)
        if not self._lock.acquire(timeout=max(timeout_s, 0.0)):
            raise self._lost(what, begun, "an earlier request still waits for its answer")
        try:
            while not self._is_closed:
                connection = self._connection or self._connect(what, begun, deadline)
                try:
                    answer = _ask(connection, request, deadline)
                except TimeoutError:
                    self._disconnect()
                    raise self._lost(what, begun, "it is connected and does not answer") from None
                except ConnectionError:
                    self._disconnect()
                    time.sleep(_RETRY_S)
                    continue
                except BaseException:
                    self._disconnect()  # an answer may come yet, and is not one to what comes next
                    raise
                return answer_in(answer)
        finally:
            self._lock.release()
        raise self._lost(what, begun, "the client is closed")

    def close(self) -> None:
        """Hang up; a request that waits in another thread ends with `DataPlaneLost`."""
        self._is_closed = True
        connection = self._connection
        if connection is not None:
            with suppress(OSError):  # the other side was first
                connection.shutdown(socket.SHUT_RDWR)
        if self._lock.acquire(timeout=_CLOSE_S):  # else the thread that waits hangs up by itself
            self._disconnect()
            self._lock.release()

    def _connect(self, what: str, begun: float, deadline: float) -> socket.socket:
        """Return a connection on which hello was said; for what is asked since `begun`."""
        while not self._is_closed:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._connection = connection
            try:
                connection.settimeout(max(_RETRY_S, deadline - time.monotonic()))
                connection.connect(os.fspath(self.path))
                require_same_user(connection)
                if self._hello is not None:
                    self.greeting = answer_in(_ask(connection, self._hello, deadline))
                return connection
            except (FileNotFoundError, ConnectionError, BlockingIOError, TimeoutError) as error:
                self._disconnect()
                why = self._why_lost()
                if why is not None or time.monotonic() + _RETRY_S >= deadline:
                    raise self._lost(what, begun, why or _reason(error)) from None
            except BaseException:
                self._disconnect()
                raise
            time.sleep(_RETRY_S)
        raise self._lost(what, begun, "the client is closed")

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _lost(self, what: str, begun: float, reason: str) -> DataPlaneLost:
        found = (
            f"{self.path}: asked the node's data plane for {what} and found no answer within "
            f"{time.monotonic() - begun:.1f} s"
        )
        if ", expected " in reason:  # it knows the remedy
            return DataPlaneLost(f"{found}: {reason}")
        return DataPlaneLost(
            f"{found} ({reason}), expected one: start the job again; it resumes from its checkpoint"
        )


def _ask(connection: socket.socket, request: Message, deadline: float) -> Message:
    send(connection, request, deadline)
    return receive(connection, deadline)


def _name(request: Message) -> str:
    return f"{request.get('request', request)!r}"[:200]


def _reason(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such socket"
    if isinstance(error, TimeoutError):
        return "it listens and does not answer the hello"
    if isinstance(error, ProtocolError):
        return str(error)
    return "nothing listens there" if isinstance(error, ConnectionRefusedError) else str(error)

"""Answers the ranks of a node on a unix socket, each in a thread of its own."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from megatron_hdp.data_plane.wire.protocol import (
    EndedError,
    Message,
    Peer,
    ProtocolError,
    error_message,
    receive,
    require_same_user,
    send,
)

MOST_PATH_BYTES = 107
_BACKLOG = 512
_CLOSE_S = 0.9
_POLL_S = 1.0
_REST_S = 0.1
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class ClientRecord:
    """One connection: a rank, or a rank that came back."""

    peer: Peer
    facts: dict[str, Any] = field(default_factory=dict)
    """What the handler keeps of it: what its hello said, segments it holds."""
    ended: threading.Event = field(default_factory=threading.Event)
    """Set when the rank has hung up, was killed, or the server closes: a handler that waits for
    something on behalf of the client gives up then."""


class Handler(Protocol):
    """Answers requests; called from several threads at once."""

    def __call__(self, client: ClientRecord, request: Message) -> Message:
        """Return the answer to a request, which may be one that was answered before.

        Raises:
            ValueError: a user's mistake; the client raises it with the same text.
            Exception: any other is the data plane's failure, `DataPlaneLost` at the client.
        """

    def gone(self, client: ClientRecord) -> None:
        """Release what a client held; called once, after its last request."""


class NodeServer:
    """Listens on a unix socket that only this user reaches."""

    def __init__(self, path: Path, handler: Handler, *, message_s: float = 30.0) -> None:
        """Begin to listen.

        Args:
            path: of the socket, in a folder of mode 0700.
            handler: answers.
            message_s: within which the rest of a message must follow its beginning, and an answer
                be taken.

        Raises:
            ValueError: the path is too long, others may enter its folder, or a living server
                listens there.
        """
        self.path = path
        self._handler = handler
        self._message_s = message_s
        self._listener = _listen(path)
        self._wake = os.eventfd(0)
        self._is_closing = False
        self._lock = threading.Lock()
        self._clients: dict[int, tuple[ClientRecord, socket.socket, threading.Thread]] = {}
        self._poll = select.epoll()
        for file in (self._listener.fileno(), self._wake):
            self._poll.register(file, select.EPOLLIN)
        self._accepting = threading.Thread(
            target=self._accept, name=f"{path.name} accepts", daemon=True
        )
        self._accepting.start()

    @property
    def clients(self) -> list[ClientRecord]:
        """Those that are connected."""
        with self._lock:
            return [client for client, _, _ in self._clients.values()]

    def close(self) -> None:
        """End all connections and threads, within a second, and take the socket away."""
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
        deadline = time.monotonic() + _CLOSE_S
        os.eventfd_write(self._wake, 1)
        self._accepting.join(_CLOSE_S)
        with suppress(FileNotFoundError):
            self.path.unlink()
        with self._lock:
            open_ones = list(self._clients.values())
            for client, connection, _ in open_ones:
                client.ended.set()
                _hang_up(connection)
        for client, _, thread in open_ones:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                _log.warning("process %d: its request still runs", client.peer.pid)
        self._listener.close()
        self._poll.close()
        os.close(self._wake)

    def _accept(self) -> None:
        """Take connections, and notice ended ones, whatever their threads are doing."""
        while not self._is_closing:
            files = {file for file, _ in self._poll.poll(_POLL_S)}
            with self._lock:
                for file in files & set(self._clients):
                    self._clients[file][0].ended.set()
            if self._listener.fileno() in files:  # last: it may reuse the number of an ended one
                self._take()

    def _take(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:  # it has gone again
            return
        except OSError as error:
            _log.warning("%s: a connection cannot be taken: %s", self.path, error)
            time.sleep(_REST_S)
            return
        try:
            client = ClientRecord(require_same_user(connection))
        except ProtocolError as error:
            _log.warning("%s: %s", self.path, error)
            connection.close()
            return
        thread = threading.Thread(
            target=self._serve,
            args=(client, connection),
            name=f"{self.path.name} serves process {client.peer.pid}",
            daemon=True,
        )
        with self._lock:
            self._clients[connection.fileno()] = (client, connection, thread)
        events = select.EPOLLRDHUP | select.EPOLLONESHOT
        self._poll.register(connection.fileno(), events)
        try:
            thread.start()
        except RuntimeError as error:
            _log.warning("%s: a connection cannot be served: %s", self.path, error)
            self._forget(connection)

    def _serve(self, client: ClientRecord, connection: socket.socket) -> None:
        try:
            while not self._is_closing:
                self._answer(client, connection)
        except EndedError:
            pass
        except (ConnectionError, TimeoutError) as error:
            if not self._is_closing and not client.ended.is_set():
                _log.warning("process %d: %s", client.peer.pid, error or "a message came in part")
        finally:
            client.ended.set()
            try:
                self._handler.gone(client)
            except Exception:
                _log.exception("process %d: what it held is not released", client.peer.pid)
            finally:
                self._forget(connection)

    def _answer(self, client: ClientRecord, connection: socket.socket) -> None:
        """Wait for one request and answer it."""
        if not _has_come(connection):
            return
        request = receive(connection, self._message_s)
        try:
            answer = self._handler(client, request)
        except Exception as error:
            if not isinstance(error, ValueError):
                _log.exception("process %d: request %.200r", client.peer.pid, request)
            answer = error_message(error)
        try:
            send(connection, answer, self._message_s)
        except (ValueError, TypeError) as error:  # the handler's mistake, not the user's
            _log.exception("process %d: the answer to %.200r", client.peer.pid, request)
            send(connection, error_message(RuntimeError(str(error))), self._message_s)

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            del self._clients[connection.fileno()]
            with suppress(OSError, ValueError):  # the server may be closed
                self._poll.unregister(connection.fileno())
            _hang_up(connection)
            connection.close()


def _listen(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > MOST_PATH_BYTES:
        raise ValueError(
            f"found a path of {len(os.fsencode(path))} bytes for a socket, expected at most "
            f"{MOST_PATH_BYTES}: {path}; name a shorter folder"
        )
    folder = path.parent.stat()
    if folder.st_uid != os.geteuid() or folder.st_mode & 0o077:
        raise ValueError(
            f"{path.parent}: found owner {folder.st_uid} and mode {folder.st_mode & 0o7777:04o}, "
            f"expected owner {os.geteuid()} and 0700 for the folder of a socket: run chmod 0700"
        )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_dead(path)
        listener.bind(os.fspath(path))
        path.chmod(0o600)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def _remove_dead(path: Path) -> None:
    """Remove the socket of a server that was killed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            path.unlink()
            return
        except TimeoutError:  # it lives, and is busy
            pass
    raise ValueError(
        f"{path}: found a living server, expected none: let it end first, or name another socket"
    )


def _has_come(connection: socket.socket) -> bool:
    """Wait a while for the beginning of a message, or the end of the connection."""
    waiting = select.poll()
    waiting.register(connection.fileno(), select.POLLIN)
    return bool(waiting.poll(_POLL_S * 1000))


def _hang_up(connection: socket.socket) -> None:
    """End a connection for both sides, even if a forked process holds a copy of it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)

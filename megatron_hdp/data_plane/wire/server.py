"""Answers the ranks of a node on a unix socket, each in a thread of its own."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from megatron_hdp.data_plane.wire.protocol import (
    Message,
    Peer,
    ProtocolError,
    error_message,
    receive,
    require_same_user,
    send,
)
from megatron_hdp.data_plane.wire.segments import require_private

MOST_PATH_BYTES = 107
_BACKLOG = 512
_CLOSE_S = 0.9
_REST_S = 0.1
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class ClientRecord:
    """One connection: a rank, or a rank that came back."""

    peer: Peer
    facts: dict[str, Any] = field(default_factory=dict)
    """What the handler keeps of it: what its hello said, segments it holds."""


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
        self._is_closing = False
        self._lock = threading.Lock()
        self._clients: dict[socket.socket, tuple[ClientRecord, threading.Thread]] = {}
        self._accepting = threading.Thread(
            target=self._accept, name=f"{path.name} accepts", daemon=True
        )
        self._accepting.start()

    @property
    def clients(self) -> list[ClientRecord]:
        """Those that are connected."""
        with self._lock:
            return [client for client, _ in self._clients.values()]

    def close(self) -> None:
        """End all connections and threads, within a second, and take the socket away."""
        if self._is_closing:
            return
        self._is_closing = True
        deadline = time.monotonic() + _CLOSE_S
        _hang_up(self._listener)
        self._accepting.join(_CLOSE_S)
        self.path.unlink(missing_ok=True)
        with self._lock:
            served = list(self._clients.values())
            for connection in self._clients:
                _hang_up(connection)
        for client, thread in served:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                _log.warning("process %d: its request still runs", client.peer.pid)
        self._listener.close()

    def _accept(self) -> None:
        while not self._is_closing:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if not self._is_closing:
                    _log.warning("%s: a connection cannot be taken: %s", self.path, error)
                    time.sleep(_REST_S)
                continue
            try:
                self._begin(ClientRecord(require_same_user(connection)), connection)
            except (ProtocolError, RuntimeError) as error:  # a stranger; or no thread is left
                _log.warning("%s: a connection is not served: %s", self.path, error)
                self._forget(connection)

    def _begin(self, client: ClientRecord, connection: socket.socket) -> None:
        thread = threading.Thread(
            target=self._serve,
            args=(client, connection),
            name=f"{self.path.name} serves process {client.peer.pid}",
            daemon=True,
        )
        with self._lock:
            self._clients[connection] = client, thread
        thread.start()

    def _serve(self, client: ClientRecord, connection: socket.socket) -> None:
        try:
            while self._has_asked(connection):
                self._answer(client, connection)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has ended, or the server closes, while a request was answered
        except (ConnectionError, TimeoutError) as error:
            if not self._is_closing:
                _log.warning("process %d: %s", client.peer.pid, error or "a message came in part")
        finally:
            try:
                self._handler.gone(client)
            except Exception:
                _log.exception("process %d: what it held is not released", client.peer.pid)
            finally:
                self._forget(connection)

    def _has_asked(self, connection: socket.socket) -> bool:
        """Wait, however long, for the beginning of a request; False if the connection ends."""
        connection.settimeout(None)
        return bool(connection.recv(1, socket.MSG_PEEK))

    def _answer(self, client: ClientRecord, connection: socket.socket) -> None:
        request = receive(connection, time.monotonic() + self._message_s)
        try:
            answer = self._handler(client, request)
        except Exception as error:
            if not isinstance(error, ValueError):
                _log.exception("process %d: request %.200r", client.peer.pid, request)
            answer = error_message(error)
        try:
            send(connection, answer, time.monotonic() + self._message_s)
        except (ValueError, TypeError) as error:  # the handler's mistake, not the user's
            _log.exception("process %d: the answer to %.200r", client.peer.pid, request)
            answer = error_message(RuntimeError(str(error)))
            send(connection, answer, time.monotonic() + self._message_s)

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._clients.pop(connection, None)
            _hang_up(connection)
            connection.close()


def _listen(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > MOST_PATH_BYTES:
        raise ValueError(
            f"found a path of {len(os.fsencode(path))} bytes for a socket, expected at most "
            f"{MOST_PATH_BYTES}: {path}; name a shorter folder"
        )
    require_private(path.parent, path.parent.stat())
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_dead(path)
        listener.bind(os.fspath(path))
        path.chmod(0o600)
        listener.listen(_BACKLOG)
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


def _hang_up(connection: socket.socket) -> None:
    """End a connection for both sides, even if a forked process holds a copy of it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)

"""Messages over sockets of the copies' own: a line of JSON, then bytes; every wait has an end.

Rings, gradients and pipelines never wait for them: no communicator is shared, packets ask for less
than best effort (DSCP CS1, RFC 8622's forerunner), and threads give way to all others of the host.
"""

from __future__ import annotations

import fcntl
import hmac
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import orjson

_LENGTH = struct.Struct("!Q")
_HELLO_BYTES = 256
_MOST_HEADER_BYTES = 1 << 30
_CHUNK = 1 << 20
_LOOK_S = 0.2
_CONNECT_S = 3.0  # a host that is gone answers nothing, and whoever leaves waits for this
_LOW_PRIORITY = 0x20  # IP_TOS of DSCP CS1
_NICENESS = 10
_SIOCGIFADDR = 0x8915


class Address(NamedTuple):
    """Where a process listens, and the word that it lets in."""

    host: str
    port: int
    token: str


class GoneError(OSError):
    """The other side has closed a connection between two messages, or this side is closing."""


def own_address() -> str:
    """This host's address, as gloo takes it: of ``GLOO_SOCKET_IFNAME``, else of its name."""
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not names:
        return socket.gethostbyname(socket.gethostname())
    name = names.split(",")[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        packed = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
    return socket.inet_ntoa(packed[20:24])


def give_way() -> None:
    """Lets all other threads of the host run before the one that calls this."""
    with suppress(OSError):  # a sandbox may forbid it; copies then only cost more
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def connect(address: Address, kind: str, timeout_s: float) -> socket.socket:
    """A connection for messages of a kind.

    Raises:
        OSError: nobody listens there, or does not answer in time.
    """
    made = socket.create_connection((address.host, address.port), min(timeout_s, _CONNECT_S))
    try:
        _configure(made, timeout_s)
        hello = orjson.dumps({"token": address.token, "kind": kind})
        made.sendall(hello.ljust(_HELLO_BYTES))
    except OSError:
        made.close()
        raise
    return made


def send(to: socket.socket, header: Mapping[str, Any], body: memoryview | None = None) -> None:
    """Sends a message.

    Raises:
        OSError: the connection is broken, or takes nothing for as long as its time-out.
    """
    line = orjson.dumps(header)
    to.sendall(_LENGTH.pack(len(line)) + line)
    if body is not None:
        send_bytes(to, body)


def send_bytes(to: socket.socket, body: memoryview) -> None:
    """Sends what follows a message; raises as `send` does."""
    for start in range(0, len(body), _CHUNK):
        to.sendall(body[start : start + _CHUNK])


def receive(connection: socket.socket, go_on: Callable[[], bool] | None = None) -> dict[str, Any]:
    """The header of the next message.

    Args:
        connection: that `connect` made, or a listener's.
        go_on: whether to wait on for a message that has not begun, asked several times a second;
            without it the connection's time-out ends the wait.

    Raises:
        GoneError: there is none: the other side has closed, or `go_on` says so.
        OSError: the connection is broken.
    """
    if go_on is not None:
        _wait_for_a_message(connection, go_on)
    length = bytearray(_LENGTH.size)
    receive_into(connection, memoryview(length))
    (num_bytes,) = _LENGTH.unpack(length)
    if num_bytes > _MOST_HEADER_BYTES:
        raise OSError(f"a message of {num_bytes:,} bytes is none of this program's")
    line = bytearray(num_bytes)
    receive_into(connection, memoryview(line))
    found: dict[str, Any] = orjson.loads(line)
    return found


def receive_into(connection: socket.socket, target: memoryview) -> None:
    """Fills `target`.

    Raises:
        OSError: the connection ends before, or brings nothing for as long as its time-out.
    """
    filled = 0
    while filled < len(target):
        count = connection.recv_into(target[filled : filled + _CHUNK])
        if not count:
            raise GoneError("the connection was closed")
        filled += count


class Listener:
    """Takes connections and gives each to the function of its kind, in a thread of its own.

    Args:
        host: the address to listen at.
        kinds: by name what serves a connection until it returns or raises an OSError.
        timeout_s: after which a connection that makes no progress is closed.
    """

    def __init__(
        self,
        host: str,
        kinds: Mapping[str, Callable[[socket.socket, Callable[[], bool]], None]],
        timeout_s: float,
    ) -> None:
        self._kinds = kinds
        self._timeout_s = timeout_s
        self._closing = threading.Event()
        self._socket = socket.create_server((host, 0), backlog=128)
        self._socket.settimeout(_LOOK_S)
        self.address = Address(host, self._socket.getsockname()[1], secrets.token_hex(16))
        self._connections: list[tuple[socket.socket, threading.Thread]] = []
        self._thread = threading.Thread(target=self._accept, name="copies-listen", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends all connections; returns in bounded time."""
        self._closing.set()
        shut(self._socket)
        self._thread.join(self._timeout_s)
        deadline = time.monotonic() + self._timeout_s
        for connection, thread in self._connections:
            shut(connection)
            thread.join(max(deadline - time.monotonic(), 0.0))
        self._connections.clear()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                continue
            except OSError:  # closed here, or by the watchdog that breaks all waits
                return
            thread = threading.Thread(
                target=self._serve, args=(connection,), name="copies-serve", daemon=True
            )
            self._connections = [one for one in self._connections if one[1].is_alive()]
            self._connections.append((connection, thread))
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        give_way()
        with connection, suppress(OSError):
            _configure(connection, self._timeout_s)
            hello = bytearray(_HELLO_BYTES)
            receive_into(connection, memoryview(hello))
            kind = self._kind(hello)
            if kind is not None:
                self._kinds[kind](connection, lambda: not self._closing.is_set())

    def _kind(self, hello: bytearray) -> str | None:
        """What a stranger wants; None: it does not know the word."""
        try:
            said = orjson.loads(hello)
            token, kind = str(said["token"]), str(said["kind"])
        except (orjson.JSONDecodeError, KeyError, TypeError):
            return None
        knows = hmac.compare_digest(token.encode(), self.address.token.encode())
        return kind if knows and kind in self._kinds else None


def shut(connection: socket.socket) -> None:
    """Ends a connection for whoever waits in it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def _configure(connection: socket.socket, timeout_s: float) -> None:
    connection.settimeout(timeout_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with suppress(OSError):  # a wish that a host may not grant
        connection.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, _LOW_PRIORITY)


def _wait_for_a_message(connection: socket.socket, go_on: Callable[[], bool]) -> None:
    timeout_s = connection.gettimeout()
    connection.settimeout(_LOOK_S)
    try:
        while go_on():
            with suppress(TimeoutError):
                if not connection.recv(1, socket.MSG_PEEK):
                    raise GoneError("the connection was closed")
                return
        raise GoneError("closing")
    finally:
        with suppress(OSError):
            connection.settimeout(timeout_s)

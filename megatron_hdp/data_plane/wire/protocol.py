"""Messages on a node's socket: four bytes that say how long, then a JSON object."""

from __future__ import annotations

import os
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any

import orjson

MAX_MESSAGE_BYTES = 16 * 2**20
_LENGTH = struct.Struct("!I")
_CREDENTIALS = struct.Struct("3i")
_PIECE_BYTES = 2**16

Message = dict[str, Any]


class ProtocolError(ConnectionError):
    """The other side ended, or sent what is no message: the connection is of no more use."""


class DataPlaneLost(RuntimeError):
    """The data plane did not answer: what was asked, of whom, for how long."""


@dataclass(frozen=True)
class Peer:
    """The process at the other end of a unix socket, as the kernel knows it."""

    pid: int
    uid: int


def peer_of(connection: socket.socket) -> Peer:
    """Return who is at the other end."""
    said = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(said)
    return Peer(pid, uid)


def require_same_user(connection: socket.socket) -> Peer:
    """Return who is at the other end.

    Raises:
        ProtocolError: another user.
    """
    peer = peer_of(connection)
    if peer.uid != os.geteuid():
        raise ProtocolError(
            f"found user {peer.uid} (process {peer.pid}) at the other end, expected user "
            f"{os.geteuid()}: the data plane serves the ranks of its own user alone"
        )
    return peer


def send(connection: socket.socket, message: Message, deadline: float) -> None:
    """Send a message before a time of `time.monotonic`.

    Raises:
        ValueError: it is longer than a message may be.
        TimeoutError: the other side did not take it in time.
        ConnectionError: the other side has ended.
    """
    text = orjson.dumps(message)
    if len(text) > MAX_MESSAGE_BYTES:
        raise ValueError(
            f"found a message of {len(text):,} bytes, expected at most {MAX_MESSAGE_BYTES:,}: "
            "arrays travel in shared memory, not in messages"
        )
    connection.settimeout(_left(deadline))
    connection.sendall(_LENGTH.pack(len(text)) + text)


def receive(connection: socket.socket, deadline: float) -> Message:
    """Return the next message, which must be there before a time of `time.monotonic`.

    Raises:
        ProtocolError: the other side ended, or sent what is no message.
        TimeoutError: none came, or not the whole of it.
    """
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size, deadline))
    if length > MAX_MESSAGE_BYTES:
        raise ProtocolError(
            f"found a message of {length:,} bytes, expected at most {MAX_MESSAGE_BYTES:,}"
        )
    text = _exactly(connection, length, deadline)
    try:
        message = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ProtocolError(f"found a message that is no JSON ({error})") from None
    if not isinstance(message, dict):
        raise ProtocolError(f"found a message of {type(message).__name__}, expected an object")
    return message


def error_message(error: Exception) -> Message:
    """Return how an exception travels: a user's mistake, or the data plane lost."""
    is_mistake = isinstance(error, ValueError)
    is_told = is_mistake or isinstance(error, DataPlaneLost)
    text = str(error) if is_told else f"{type(error).__name__}: {error}"
    # a path may hold bytes that are no UTF-8
    text = text.encode(errors="backslashreplace").decode()
    return {"error": "mistake" if is_mistake else "lost", "message": text}


def answer_in(message: Message) -> Message:
    """Return an answer.

    Raises:
        ValueError: it is a user's mistake.
        DataPlaneLost: it is another error.
    """
    if "error" not in message:
        return message
    text = str(message.get("message", ""))
    raise ValueError(text) if message["error"] == "mistake" else DataPlaneLost(text)


def _exactly(connection: socket.socket, count: int, deadline: float) -> bytes:
    found = bytearray()
    while len(found) < count:
        connection.settimeout(_left(deadline))
        piece = connection.recv(min(count - len(found), _PIECE_BYTES))
        if not piece:
            raise ProtocolError(
                f"found the end of the connection after {len(found)} bytes, expected {count}"
            )
        found += piece
    return bytes(found)


def _left(deadline: float) -> float:
    """Return the seconds until a deadline, of which some are always left: 0 would not wait."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left

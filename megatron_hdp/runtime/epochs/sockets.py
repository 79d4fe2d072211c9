"""This process's connections over TCP, which a watchdog shuts to end all waits for other ranks.

gloo has no way to abort what waits. A connection that is shut down raises in whoever waits at
either end, within milliseconds.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Collection, Iterator
from contextlib import suppress

_DESCRIPTORS = "/proc/self/fd"
_CALL_S = 1.0


def open_sockets() -> set[str]:
    """Names of this process's sockets, of which no two that are open at a time are equal."""
    found = set()
    for descriptor in os.listdir(_DESCRIPTORS):
        with suppress(OSError):
            name = os.readlink(f"{_DESCRIPTORS}/{descriptor}")
            if name.startswith("socket:"):
                found.add(name)
    return found


def shut_connections(spared: Collection[str]) -> int:
    """Shuts every connection over TCP but the `spared` ones, by name; returns how many.

    Those that are being made, too. What listens stays: gloo would end the process for it.
    """
    num_shut = 0
    for _, one in _tcp_sockets(spared):
        if not _listens(one):
            with suppress(OSError):  # it is no connection
                one.shutdown(socket.SHUT_RDWR)
                num_shut += 1
    return num_shut


def call_listeners(others: Collection[str], num_members: int) -> set[str]:
    """Connects to what of this process listens, but for the `others`, in place of each member.

    Of two members gloo has one listen for the other, with no connection that could be shut: it
    would wait for a dead one five times its timeout. It tells who calls by a number that it counts
    from 0 for each group, the caller's place in it.

    Args:
        others: names of sockets that are not for members.
        num_members: the most of a group.

    Returns:
        The names of those that were called.
    """
    called = set()
    for name, one in _tcp_sockets(others):
        if not _listens(one):
            continue
        called.add(name)
        for place in range(num_members):
            with suppress(OSError), socket.socket(one.family) as call:  # it was closed meanwhile
                call.settimeout(_CALL_S)
                call.connect(one.getsockname())
                call.sendall(struct.pack("=q", place))
    return called


def _tcp_sockets(spared: Collection[str]) -> Iterator[tuple[str, socket.socket]]:
    """Names of this process's sockets over TCP but the `spared` ones, and copies of them."""
    for descriptor in os.listdir(_DESCRIPTORS):
        with suppress(OSError):  # it was closed meanwhile
            name = os.readlink(f"{_DESCRIPTORS}/{descriptor}")
            if not name.startswith("socket:") or name in spared:
                continue
            with socket.socket(fileno=os.dup(int(descriptor))) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6):
                    yield name, one


def _listens(one: socket.socket) -> bool:
    return one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) != 0

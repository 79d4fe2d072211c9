"""This process's connections over TCP, which a watchdog shuts to end all waits for other ranks.

gloo has no way to abort what waits. A connection that is shut down raises in whoever waits at
either end, within milliseconds.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection
from contextlib import suppress

_DESCRIPTORS = "/proc/self/fd"


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
    """Shuts every connection over TCP but the `spared` ones, by name; returns how many."""
    num_shut = 0
    for descriptor in os.listdir(_DESCRIPTORS):
        with suppress(OSError):  # it was closed meanwhile, or is no connection
            name = os.readlink(f"{_DESCRIPTORS}/{descriptor}")
            if not name.startswith("socket:") or name in spared:
                continue
            with socket.socket(fileno=os.dup(int(descriptor))) as one:
                if one.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                one.getpeername()  # what listens has none; gloo would end the process for it
                one.shutdown(socket.SHUT_RDWR)
                num_shut += 1
    return num_shut

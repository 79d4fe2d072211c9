"""Ports that a server is started at later, in another process."""

import random
import socket
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

_GIVEN_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 10_000  # below are those of well-known services
_TRIES = 100


def free_port(taken: Collection[int] = ()) -> int:
    """Return a port of this machine that nobody listens at, and none of those `taken`.

    It is below those that the kernel gives to connections, where there are some, so that none of
    these takes it before the server has it.
    """
    end = _begin_of_given_out()
    ports = random.SystemRandom().sample(range(_LOWEST, end), min(_TRIES, end - _LOWEST))
    for port in (one for one in ports if one not in taken):
        with socket.socket() as one, suppress(OSError):
            one.bind(("", port))
            return port
    while True:
        with socket.socket() as one:
            one.bind(("", 0))
            port = int(one.getsockname()[1])
        if port not in taken:
            return port


def _begin_of_given_out() -> int:
    with suppress(OSError, ValueError):
        return max(int(_GIVEN_OUT.read_text().split()[0]), _LOWEST)
    return _LOWEST

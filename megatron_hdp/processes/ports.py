"""Ports that a server is started at later, in another process."""

import random
import socket
from contextlib import suppress
from pathlib import Path

_GIVEN_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 10_000  # below are those of well-known services
_TRIES = 100


def free_port() -> int:
    """Return a port of this machine that nobody listens at.

    It is below those that the kernel gives to connections, where there are some, so that none of
    these takes it before the server has it.
    """
    end = _begin_of_given_out()
    for port in random.SystemRandom().sample(range(_LOWEST, end), min(_TRIES, end - _LOWEST)):
        with socket.socket() as one, suppress(OSError):
            one.bind(("", port))
            return port
    with socket.socket() as one:
        one.bind(("", 0))
        return int(one.getsockname()[1])


def _begin_of_given_out() -> int:
    with suppress(OSError, ValueError):
        return max(int(_GIVEN_OUT.read_text().split()[0]), _LOWEST)
    return _LOWEST

"""This process joins a Ray cluster: one that is being started, or one that must run already."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import serialization_addons

from megatron_hdp.data_plane.cluster.ray_node import answers

_PAUSE_S = 0.5
_LISTENS_S = 10.0  # for a head that is just being started


@contextmanager
def connected(address: str | None, start_s: float, **options: Any) -> Iterator[None]:
    """This process in the cluster at an address, while the block runs.

    Args:
        address: of its head, which may still be starting; None: of RAY_ADDRESS, which runs already.
        start_s: within which it must be up.
        options: of ``ray.init``.

    Raises:
        ConnectionError: there is no such cluster, or it refuses this process.
        RuntimeError: Ray on this node is not up in time.
    """
    deadline = time.monotonic() + start_s
    leave_out_addons()
    if address is None:
        _require_cluster(os.environ.get("RAY_ADDRESS", ""))
    while True:
        try:
            ray.init(address=address or "auto", **options)
            break
        except (ValueError, RuntimeError, OSError, RayError) as error:
            ray.shutdown()
            why = _first_line(error)
            if address is None:
                raise _no_cluster(why) from None
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"Ray on this node does not answer after {start_s:.0f} s ({why})"
                ) from None
        time.sleep(_PAUSE_S)
    try:
        yield
    finally:
        ray.shutdown()


def leave_out_addons() -> None:
    """Keep Ray from importing Arrow and Pydantic, whose values nothing here sends.

    They take 15 MB of a process. Workers call this, too: see `ray_node`.
    """
    serialization_addons.apply = lambda context: None


def _require_cluster(address: str) -> None:
    """Ray itself would ask for minutes, and say nothing, where nobody listens."""
    if "://" in address:
        raise _no_cluster("it is the address of a Ray client server, not HOST:PORT of a head")
    if not address.rpartition(":")[2].isdigit():
        return  # "auto", or none: Ray looks for one on this host
    deadline = time.monotonic() + _LISTENS_S
    while not answers(address):
        if time.monotonic() > deadline:
            raise _no_cluster("nobody listens there")
        time.sleep(_PAUSE_S)


def _no_cluster(why: str) -> ConnectionError:
    found = os.environ.get("RAY_ADDRESS", "")
    return ConnectionError(
        f"RAY_ADDRESS={found!r}: found no cluster there that accepts this process ({why}), "
        "expected one that runs on this node, too: start it, give its token if it asks for one "
        "(RAY_AUTH_MODE=token, RAY_AUTH_TOKEN), or unset RAY_ADDRESS"
    )


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__

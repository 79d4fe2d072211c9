"""What a node's part of the data plane tells others in files of its folder: alive, lost, status.

Ranks must not wait for a part that never comes back; anybody of its user may read what it is doing.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from megatron_hdp.data_plane.cluster.job_folder import LOST, lock_in
from megatron_hdp.files import write_atomically

_ALIVE, _STATUS, _LOG = "alive", "status.json", "log"
_TAIL_LINES, _TAIL_BYTES = 20, 1 << 16
write_own = partial(write_atomically, durable=False, mode=0o600)
"""Write a file of a plane, which its user alone may read; it need not outlast the machine."""


def mark_alive(folder: Path) -> None:
    """Mark the node's part as alive until this process ends, however it does."""
    lock_in(folder, _ALIVE)  # never closed: the kernel releases it


def mark_lost(folder: Path, why: str) -> None:
    """Tell the node's ranks why its part has ended for good, unless that is told; the log stays."""
    if (folder / LOST).exists():
        return
    try:
        write_own(folder / LOST, why.encode())
    except OSError:  # no room: it stays, without the reason
        (folder / LOST).touch(mode=0o600)


def log_of(folder: Path) -> Path:
    """Return where a node's part writes what it has to say."""
    return folder / _LOG


def last_words(folder: Path) -> str | None:
    """Return how the node's part ended, with the last lines of its log; None if it ended well."""
    if not (folder / LOST).exists() or not log_of(folder).exists():  # or somebody has removed it
        return None
    with log_of(folder).open("rb") as log:
        log.seek(max(log.seek(0, os.SEEK_END) - _TAIL_BYTES, 0))
        lines = log.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
    tail = "".join(f"\n  {line}" for line in lines)
    return (
        f"data plane: it ended badly, so its log and Ray's stay in {folder}, until "
        f"`megatron-hdp doctor --clean-up`; the last lines of {log_of(folder)}:{tail}"
    )


def why_lost(folder: Path) -> str | None:
    """Return why the node's part has ended for good; None while it lives or is being started."""
    with suppress(OSError):
        return (folder / LOST).read_text()
    try:
        file = os.open(folder / _ALIVE, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None if folder.exists() else "its folder is gone"
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    finally:
        os.close(file)
    return "its process, megatron_hdp.data_plane.host, has ended or was killed"


def write_status(folder: Path, found: Mapping[str, Any]) -> None:
    """Replace a node's status."""
    write_own(folder / _STATUS, orjson.dumps({**found, "time": time.time()}))


def read_status(folder: Path) -> dict[str, Any] | None:
    """Return a node's status; None where there is none yet."""
    try:
        found: dict[str, Any] = orjson.loads((folder / _STATUS).read_bytes())
    except FileNotFoundError:
        return None
    return found

"""Whether a node's part of the data plane lives: ranks must not wait for what never comes back."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

_ALIVE, _LOST = "alive", "lost"


def begin_life(folder: Path) -> None:
    """Mark the node's part as living until this process ends, however it does."""
    unnamed = folder / f"{_ALIVE}.new"
    file = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX)  # never closed: the kernel lets go
    unnamed.rename(folder / _ALIVE)


def tell_loss(folder: Path, why: str) -> None:
    """Tell the node's ranks, before this process ends, why it does."""
    unnamed = folder / f"{_LOST}.new"
    unnamed.write_text(why)
    unnamed.rename(folder / _LOST)


def why_lost(folder: Path) -> str | None:
    """Return why the node's part has ended for good; None while it lives or is being started."""
    with suppress(OSError):
        return (folder / _LOST).read_text()
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

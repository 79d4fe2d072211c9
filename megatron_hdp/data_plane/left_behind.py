"""What data planes of dead jobs have left on this host: folders of this user, and what has them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_hdp.data_plane.cluster.job_folder import (
    LOST,
    SHARED_MEMORY,
    folders_of_jobs,
    processes_in,
    remove_dead,
)
from megatron_hdp.data_plane.node_files import why_lost


@dataclass(frozen=True)
class LeftBehind:
    """A folder of a job that is dead."""

    folder: str
    num_bytes: int
    pids: tuple[int, ...]
    """Of Ray's processes that still have it."""
    why_kept: str | None
    """Why the job's data plane ended badly, of which the log there tells more."""


def find_left_behind() -> tuple[LeftBehind, ...]:
    """Look for the folders of dead jobs; nothing is changed."""
    return tuple(
        LeftBehind(
            str(folder),
            _num_bytes(folder),
            tuple(one.pid for one in processes_in(folder)),
            why_lost(folder) if (folder / LOST).exists() else None,
        )
        for parent in (None, SHARED_MEMORY)
        for folder in folders_of_jobs(parent, alive=False)
    )


def clean_up(found: Sequence[LeftBehind]) -> tuple[LeftBehind, ...]:
    """Remove folders, and end processes that have them; return what is still there."""
    return tuple(one for one in found if not remove_dead(Path(one.folder), even_lost=True))


def _num_bytes(folder: Path) -> int:
    total = 0
    for one in folder.rglob("*"):
        with suppress(OSError):  # gone by now
            total += one.lstat().st_blocks * 512
    return total

"""Where a conversion writes: a folder that takes its name when all of it is there.

    DIR.partial/            what is finished so far; the next run resumes with it
        files/              becomes DIR
        made-from.txt       what it is made from; another source begins anew
        lock                held by the process that writes
        __3_0.distcp.done   what is known of a finished file; without it the file is written again

A kill at any moment leaves finished files and perhaps one that is not; what readers see is one
rename. One right after that leaves the rest of the folder behind, without files.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_hdp.files import locked, sync, write_atomically

_FILES, _MADE_FROM, _LOCK, _DONE = "files", "made-from.txt", "lock", ".done"


class Workplace:
    """A folder that is being made; see `workplace`."""

    def __init__(self, partial: Path) -> None:
        self._partial = partial
        self.folder = partial / _FILES
        """Where to write."""

    def record_of(self, name: str) -> Any:
        """What `finish` was told of a file; None if it is not finished."""
        try:
            return json.loads((self._partial / f"{name}{_DONE}").read_bytes())
        except FileNotFoundError:
            return None

    def finish(self, name: str, record: Any) -> None:
        """Notes that a file, which is on the disk, is finished."""
        path = self._partial / f"{name}{_DONE}"
        write_atomically(path, json.dumps(record).encode(), durable=True)


@contextmanager
def workplace(target: Path, made_from: str, say: Callable[[str], None]) -> Iterator[Workplace]:
    """Where to make `target`, a folder, which appears as a whole when the block ends.

    Args:
        target: of the folder.
        made_from: what decides its content; what was finished of another content is removed.
        say: prints one line.

    Raises:
        ValueError: the target is there or cannot be made, or the disk is full.
        OSError: another process makes it, for one.
    """
    partial = target.with_name(target.name + ".partial")
    require_new(target)
    with _can_be_made(target):
        partial.mkdir(parents=True, exist_ok=True)
        (partial / _LOCK).touch()
    with locked(partial / _LOCK, str(target), say, patience_s=0.0):
        _begin(partial, made_from, say)
        try:
            yield Workplace(partial)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise ValueError(
                f"{target.parent}: found {shutil.disk_usage(partial).free:,} bytes free, expected "
                "room for what is left: make room and give the same command again, it resumes with "
                f"the files in {partial}"
            ) from error
        require_new(target)
        _sync_all(partial / _FILES)
        os.rename(partial / _FILES, target)
        sync(target.parent)
        shutil.rmtree(partial)


def require_new(target: Path) -> None:
    """Refuses a target that holds something.

    Raises:
        ValueError: it does, or there can be no such folder.
    """
    with _can_be_made(target):
        if target.is_dir() and not any(target.iterdir()):
            return
        if target.exists() or target.is_symlink():
            raise ValueError(
                f"{target}: found something there, expected nothing: give another folder, or "
                "remove it"
            )


@contextmanager
def _can_be_made(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"{target}: found no way to make a folder there ({error.strerror}), expected a new "
            "name, of at most 200 bytes, in a folder where you may write: give another folder"
        ) from None


def _begin(partial: Path, made_from: str, say: Callable[[str], None]) -> None:
    path, files = partial / _MADE_FROM, partial / _FILES
    before = path.read_text() if path.exists() else None
    if before == made_from and files.is_dir():  # or it became the target
        say(f"resuming with the finished files in {partial}")
        return
    others = [one for one in partial.iterdir() if one.name != _LOCK]
    if before is None and (set(others) - {files} or (files.is_dir() and any(files.iterdir()))):
        raise ValueError(
            f"{partial}: found files that no conversion has written ({others[0].name}), expected "
            "such a folder to hold what an earlier run of this command has finished: move it away"
        )
    if before not in (None, made_from):
        say(f"{partial} holds files made from another source: starting over")
    for one in sorted(others, key=lambda path: path.name == _MADE_FROM):
        shutil.rmtree(one) if one.is_dir() else one.unlink()
    files.mkdir()
    path.write_text(made_from)


def _sync_all(folder: Path) -> None:
    """Forces small files and the folders' entries to the disk; large files are there."""
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            if path.stat().st_size < 1 << 20:
                sync(path)
        sync(parent)

"""Whether a cache is in use: who opens one holds it and sets its time, so that it is not pruned.

What is opened is one file of the cache, its *main file*: of a table the ``.table``, of a prepared
source the ``.bin``. It is held by a shared lock, which ends with the file's last descriptor. Its
time of access is set by hand, because not every file system keeps one; its time of change stays.
"""

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_hdp.files import is_named


@dataclass(frozen=True)
class StoredCache:
    """The files of one cache in a folder."""

    name: str
    """What its files are called up to their suffixes."""
    main: Path
    """The file that whoever uses the cache holds; missing where it is half made."""
    lock: Path
    """The lock of whoever makes it; it need not exist."""
    parts: tuple[Path, ...]
    """All else, in the order in which it may be removed; a folder stands for what it holds."""


def hold(file: int) -> bool:
    """Hold a main file until it is closed, and note that it was opened now.

    Returns:
        Whether it still has a name: false if it was pruned in this very moment.
    """
    with suppress(OSError):  # of a file system that is read-only here, and has no locks
        fcntl.flock(file, fcntl.LOCK_SH)
    status = os.fstat(file)
    with suppress(OSError):  # another user's, whose time of access the kernel keeps where it may
        os.utime(file, ns=(time.time_ns(), status.st_mtime_ns))
    return status.st_nlink > 0


def note_opened(path: Path) -> bool:
    """Note that a main file was opened now; return whether it is there."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return hold(file)
    finally:
        os.close(file)


@contextmanager
def alone(path: Path, *, make: bool = False) -> Iterator[bool]:
    """Lock a file so that nobody else has it within the block; yield whether nobody else had it.

    Args:
        path: of the file.
        make: it, if it is missing.

    Raises:
        OSError: it cannot be opened, or its file system has no locks.
    """
    file = _open_to_lock(path, os.O_CREAT if make else 0)
    try:
        yield _locked(file, path) and is_named(file, path)
    finally:
        os.close(file)


def _open_to_lock(path: Path, more_flags: int) -> int:
    """Open a file for writing, which a network's file system wants of an exclusive lock."""
    flags = os.O_RDWR | os.O_CLOEXEC | more_flags
    with suppress(PermissionError):
        return os.open(path, flags, 0o666)
    mode = stat.S_IMODE(path.stat().st_mode)
    path.chmod(mode | stat.S_IWUSR)
    try:
        return os.open(path, flags)
    finally:
        path.chmod(mode)


def _locked(file: int, path: Path) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise OSError(error.errno, error.strerror, str(path)) from None
    return True

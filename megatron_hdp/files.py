"""Files that are whole or not there, and locks that let one process at a time make a thing.

Every writer declares whether its file is *durable*: content and name are on the disk, and stay
there if the machine crashes. A file that is not durable outlasts the process alone: after a crash
of the machine it may be empty, old or missing.
"""

import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

Path = str | os.PathLike[str]
Say = Callable[[str], None]
"""Takes a line for the log."""

SAY_AFTER_S, SAY_AGAIN_S = 3.0, 60.0
_LONGEST_PAUSE_S = 0.5


@contextmanager
def new_file(path: Path, *, durable: bool) -> Iterator[str]:
    """Yield a temporary name to write to, which becomes ``path`` when the block ends.

    If the block fails, the temporary file is removed and an older file stays as it was. A kill
    leaves the temporary file behind: its name is that of the file with ``.tmp`` and a number.

    The file that a symbolic link names takes the content. A device or a pipe has no content to
    keep: its own name is yielded, and what is written goes through.

    Raises:
        OSError: a symbolic link that leads to itself.
    """
    name = os.fspath(path)
    if is_stream(name):
        yield name
        return
    if os.path.islink(name):
        name = os.path.realpath(name)
        if os.path.islink(name):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fspath(path))
    temporary = f"{name}.tmp{os.getpid()}"
    try:
        yield temporary
        put_in_place(temporary, name, durable=durable)
    finally:
        with suppress(FileNotFoundError):
            os.remove(temporary)


def is_stream(path: Path) -> bool:
    """Return whether a path names something to write to that is no file: a device, a pipe."""
    return os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path))


def put_in_place(temporary: Path, path: Path, *, durable: bool) -> None:
    """Give a complete file its name; what had that name before is gone."""
    if durable:
        sync(temporary)
    os.replace(temporary, path)
    if durable:
        sync(os.path.dirname(path) or ".")


def write_atomically(path: Path, content: bytes, *, durable: bool, mode: int = 0o666) -> None:
    """Write a file: readers see the old one or all of the new one."""
    opener = partial(os.open, mode=mode)
    with new_file(path, durable=durable) as temporary, open(temporary, "wb", opener=opener) as file:
        file.write(content)


def write_synced(path: Path, content: bytes) -> None:
    """Write a file in place, and wait until its content is on the disk."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's names, are on the disk."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def note_opened(file: int | Path) -> bool:
    """Set a file's time of access, by which caches that nobody opens are found; is it there?

    It is set by hand, because not every file system keeps it; the time of change stays.
    """
    try:
        status = os.stat(file)
    except FileNotFoundError:
        return False
    with suppress(OSError):  # another user's, whose time of access the kernel keeps where it may
        os.utime(file, ns=(time.time_ns(), status.st_mtime_ns))
    return True


@contextmanager
def locked(path: Path, what: str, say: Say, *, patience_s: float) -> Iterator[Say]:
    """Hold the lock of a file within the block; it is released however the process ends.

    Args:
        path: of the lock's file, which is made if it is missing, and stays.
        what: is made under the lock, for messages.
        say: takes a line about who is waited for, after some seconds and once a minute.
        patience_s: how long to wait for a holder that notes no progress.

    Yields:
        Takes a note of the holder's progress, for those who wait.

    Raises:
        TimeoutError: the holder has noted nothing for so long.
        OSError: the file cannot be made, or its file system has no locks.
    """
    file = _locked_file(path, what, say, patience_s)

    def note(progress: str) -> None:
        text = f"process {os.getpid()} on {socket.gethostname()}, {progress}".encode()
        with suppress(OSError):  # whoever waits knows less then
            os.pwrite(file, text, 0)
            os.ftruncate(file, len(text))

    try:
        note("at the beginning")
        yield note
    finally:
        os.close(file)


def _locked_file(path: Path, what: str, say: Say, patience_s: float) -> int:
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            _wait(file, path, what, say, patience_s)
        except BaseException:
            os.close(file)
            raise
        if is_named(file, path):
            return file
        os.close(file)  # it was removed: another process may hold the one that has its name now


def is_named(file: int, path: Path) -> bool:
    """Return whether an open file is the one at a path: a lock of another would exclude nobody."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(file))


def _wait(file: int, path: Path, what: str, say: Say, patience_s: float) -> None:
    """Return once the lock is this process's."""
    changed = time.monotonic()
    say_at, seen, pause_s = changed + SAY_AFTER_S, "", 0.01
    while not _try(file, path):
        now = time.monotonic()
        holder = os.pread(file, 4096, 0).decode(errors="replace").strip() or "another process"
        if holder != seen:
            seen, changed = holder, now
        if now - changed >= patience_s:
            raise TimeoutError(
                f"{what}: found {os.fspath(path)} locked by {holder}, without progress for "
                f"{patience_s:,.0f} s, expected it to be free by now: end that process if it "
                "hangs, or wait for it, and start again; what it has finished is kept"
            )
        if now >= say_at:
            say(f"{what}: waiting for {holder}, which makes it")
            say_at = now + SAY_AGAIN_S
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _try(file: int, path: Path) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        found = f"{error.strerror}: no lock here, take a folder on a file system with locks"
        raise OSError(error.errno, found, os.fspath(path)) from error
    return True

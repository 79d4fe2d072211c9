"""One process of a node builds, the others wait: a lock that ends with whoever holds it."""

import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_hdp.data.cache_use import is_named
from megatron_hdp.data.tables.folder import TableCacheError, unusable

Say = Callable[[str], None]
"""Takes a line for the log."""

TELL_AFTER_S = 3.0
DEADLINE_S = 600.0
_LONGEST_PAUSE_S = 0.5


@contextmanager
def node_lock(path: Path, what: str, say: Say) -> Iterator[Say]:
    """Hold the lock of a file until the block is left; the kernel gives up a dead process's.

    Args:
        path: of the lock's file, which stays until the table is pruned.
        what: is built under it, for messages.
        say: is told once, after some seconds, who builds.

    Yields:
        Takes what the holder is at, for those who wait: whoever notes nothing for `DEADLINE_S`
        counts as stuck.

    Raises:
        TableCacheError: the file cannot be made, or its holder is stuck.
    """
    file = _acquired(path, what, say)
    me = f"process {os.getpid()} on {socket.gethostname()}"

    def note(at: str) -> None:
        text = f"{me}, {at}".encode()
        with suppress(OSError):  # whoever waits knows less then
            os.pwrite(file, text, 0)
            os.ftruncate(file, len(text))

    try:
        note("at the beginning")
        yield note
    finally:
        os.close(file)


def _acquired(path: Path, what: str, say: Say) -> int:
    """Return the lock's file, open, once the lock is this process's."""
    while True:
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise unusable(path.parent, error) from None
        try:
            _wait(file, path, what, say)
        except BaseException:
            os.close(file)
            raise
        if is_named(file, path):
            return file
        os.close(file)  # it was pruned: another process may hold the one that has its name now


def _wait(file: int, path: Path, what: str, say: Say) -> None:
    """Return once the lock is this process's."""
    began = changed = time.monotonic()
    seen, has_said, pause = "", False, 0.01
    while not _try(file, path.parent):
        now, holder = time.monotonic(), os.pread(file, 4096, 0).decode(errors="replace")
        if holder != seen:
            seen, changed = holder, now
        if now - began > TELL_AFTER_S and not has_said:
            say(f"{what}: waiting for {holder}, which makes it")
            has_said = True
        if now - changed > DEADLINE_S:
            raise TableCacheError(
                f"{what}: found {path} locked by {holder}, without progress for {DEADLINE_S:.0f} "
                "s, expected it to be made by now: end that process if it hangs and start again, "
                "or name another folder with --data-cache-path"
            )
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def _try(file: int, folder: Path) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise unusable(folder, error) from None
    return True

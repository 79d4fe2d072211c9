"""One process at a time makes a thing: others wait for it, and say so."""

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_hdp.data.cache_use import is_named

_FIRST_LOOK_S, _LOOK_S = 0.01, 0.2
_SAY_AGAIN_S = 60.0


@contextmanager
def only_one(path: Path, what: str, wait_s: float, say: Callable[[str], None]) -> Iterator[None]:
    """Hold a lock file within the block; it is released however the process ends.

    Args:
        path: of the lock file, which stays until what is made is pruned.
        what: is made, for messages.
        wait_s: how long to wait for another process.
        say: is told of waiting, once a minute.

    Raises:
        TimeoutError: the other process has not finished.
        OSError: the file system has no locks, for one.
    """
    began = time.monotonic()
    while True:
        with open(path, "a+") as file:
            _acquire(file.fileno(), path, what, began, wait_s, say)
            if not is_named(file.fileno(), path):
                continue  # it was pruned: another process may hold the one that has its name now
            file.truncate(0)
            file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
            file.flush()
            yield
            return


def _acquire(
    descriptor: int,
    path: Path,
    what: str,
    began: float,
    wait_s: float,
    say: Callable[[str], None],
) -> None:
    said, pause_s = -_SAY_AGAIN_S, _FIRST_LOOK_S
    while not _try(descriptor, path):
        waited = time.monotonic() - began
        holder = os.pread(descriptor, 4096, 0).decode().strip() or "another process"
        if waited >= wait_s:
            raise TimeoutError(
                f"{what} is still being prepared by {holder} after {waited:,.0f} s, expected it to "
                f"be finished within {wait_s:,.0f} s: look what that process does, or end it; what "
                "it has finished is kept"
            )
        if waited - said >= _SAY_AGAIN_S:
            say(f"{what} is being prepared by {holder}: waiting for it")
            said = waited
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LOOK_S)


def _try(descriptor: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        reason = f"no lock ({error.strerror}), expected a file system with locks"
        raise OSError(error.errno, f"{reason}: take another folder", str(path)) from error
    return True

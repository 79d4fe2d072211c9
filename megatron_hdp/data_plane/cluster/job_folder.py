"""A job's folder for temporary files: locked while the job lives, removed when it is dead.

A job removes its own folder at its end. One that is killed cannot: its keeper does, else the next
start on the same host, or ``megatron-hdp doctor --clean-up``. They remove folders that this user
made here and whose lock nobody holds any more. Some of those that tell why a job ended badly stay.
"""

import fcntl
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

PREFIX = "hdp-data-"
"""Of the names of planes, and of their folders on each node."""
LOST = "lost"
"""A file in a folder that stays, as its log tells why the job ended badly."""
RAY = "r"
"""Below a job's folder, as Ray opens its own to everybody; short for sockets."""
SHARED_MEMORY = Path("/dev/shm")
_MOST_KEPT = 8
_SHORT = "/tmp"
_LOCK = "host"  # the locked file, which holds the host's name: folders may be seen by several
_SOCKET_BYTES = 107  # of a socket's name, the kernel's limit
_RAYS_SOCKET = f"/{RAY}/session_2026-01-31_23-59-59_123456_1234567/sockets/plasma_store"
_LONGEST_PARENT = _SOCKET_BYTES - len(f"/{PREFIX}12345678{_RAYS_SOCKET}")


@contextmanager
def folder_of_job(parent: Path | None = None) -> Iterator[tuple[str, int]]:
    """A new folder, until the block is left; those of dead jobs are removed first.

    It stays if the job ended badly, that is, if there is a file `LOST` in it.

    Args:
        parent: in which it is; None: the folder of temporary files.

    Yields:
        Its path, and the open file of its lock. The job counts as alive as long as any process has
        that open: hand it to those that use the folder.

    Raises:
        ValueError: nothing can be made there.
    """
    of_sockets = parent is None
    parent = parent or Path(_short_folder())
    kept = [one for one in folders_of_jobs(parent, alive=False) if not remove_dead(one)]
    for older in sorted(kept, key=_time_of)[:-_MOST_KEPT]:
        remove_dead(older, even_lost=True)
    folder = None
    try:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        lock = lock_in(folder, _LOCK, socket.gethostname())
    except OSError as error:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        raise (_no_folder(error) if of_sockets else _no_room(parent, error)) from None
    try:
        yield str(folder), lock
    finally:
        if not (folder / LOST).exists() or not (folder / _LOCK).exists():  # or half is gone
            shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def folders_of_jobs(parent: Path | None = None, *, alive: bool) -> list[Path]:
    """Return the folders of this user's jobs on this host, of those that live or of dead ones.

    Args:
        parent: in which they are; None: the folder of temporary files.
        alive: which ones.
    """
    parent = parent or Path(_short_folder())
    folders = sorted(parent.glob(f"{PREFIX}*"))
    return [one for one in folders if _lives(one, fcntl.LOCK_SH) is alive]  # others may look, too


def remove_dead(folder: Path, *, even_lost: bool = False) -> bool:
    """Remove a folder if its job is dead, and end Ray's processes that still have it.

    Args:
        folder: of this user; nothing happens to another one.
        even_lost: also one that stays, as its job ended badly.

    Returns:
        Whether it is gone.
    """

    def remove(folder: Path) -> None:
        if even_lost or not (folder / LOST).exists():
            for one in processes_in(folder):
                with suppress(psutil.Error):
                    one.kill()
            shutil.rmtree(folder)

    _lives(folder, fcntl.LOCK_EX, if_dead=remove)
    return not folder.exists()


def processes_in(folder: Path) -> list[psutil.Process]:
    """Return Ray's processes of this user that were started for a job's folder."""
    found = []
    for one in psutil.process_iter(["cmdline", "uids"]):
        words, user = one.info["cmdline"] or [], one.info["uids"]
        if user and user.real == os.getuid() and _is_rays(one, words, folder):
            found.append(one)
    return found


def _is_rays(process: psutil.Process, words: list[str], folder: Path) -> bool:
    if words and words[0].startswith("ray::"):  # it has written its title over its words
        with suppress(psutil.Error):
            files = [Path(one.path) for one in process.open_files()]
            return any(one.is_relative_to(folder / RAY) for one in files)
    return any(f"={folder}/{RAY}" in word for word in words)


def _lives(
    folder: Path, kind: int, if_dead: Callable[[Path], None] = lambda folder: None
) -> bool | None:
    """Whether a job of this user on this host lives; something may be done where it is dead.

    None: it is none of this user's jobs on this host.
    """
    with suppress(OSError):  # not ours to read, or gone by now
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            return None
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(lock).st_mode):  # a pipe, which might never be read
                return None
            if os.read(lock, 256).decode(errors="replace") != socket.gethostname():
                return None
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
            if_dead(folder)
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(lock)
    return None


def _time_of(folder: Path) -> float:
    with suppress(OSError):
        return folder.stat().st_mtime
    return 0.0  # gone by now


def takes_sockets(folder: str | os.PathLike[str]) -> bool:
    """Whether the name of a folder is short enough for those of Ray's sockets below it."""
    return len(os.fsencode(folder)) <= _LONGEST_PARENT


def _short_folder() -> str:
    """That of temporary files, unless its name is too long for those of sockets below it.

    Raises:
        ValueError: no folder for temporary files can be written.
    """
    try:
        folder = tempfile.gettempdir()
    except OSError as error:
        raise _no_folder(error) from None
    return folder if takes_sockets(folder) else _SHORT


def _no_folder(error: OSError) -> ValueError:
    return ValueError(
        f"found TMPDIR={os.environ.get('TMPDIR', '')!r} and no room in it or in {_SHORT} for a "
        f"folder of Ray's sockets ({error}), expected one: set TMPDIR to a folder of yours whose "
        f"name has at most {_LONGEST_PARENT} bytes, as names of sockets end at {_SOCKET_BYTES}"
    )


def _no_room(parent: Path, error: OSError) -> ValueError:
    return ValueError(
        f"{parent}: found that no folder for a data plane can be made there ({error.strerror}), "
        "expected room for its steps: make some (`megatron-hdp doctor --clean-up` removes what "
        "dead jobs have left; a container's size is set by --shm-size)"
    )


def lock_in(folder: Path, name: str, text: str = "") -> int:
    """Make a file and lock it; who sees it under its name finds it locked."""
    unnamed = folder / f"{name}.new"
    lock = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.write(lock, text.encode())
        unnamed.rename(folder / name)
    except BaseException:
        os.close(lock)
        raise
    return lock

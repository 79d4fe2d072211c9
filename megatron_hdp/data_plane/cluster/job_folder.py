"""A job's folder for Ray's temporary files: locked while the job lives, removed when it is dead.

A job removes its own folder at its end. One that is killed cannot, so the next start on the same
host does: of folders that this user made here, those whose lock nobody holds any more.
"""

import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "hdp-ray-"
_SHORT = "/tmp"
_LOCK = "host"  # the locked file, which holds the host's name: folders may be seen by several
_SOCKET_BYTES = 107  # of a socket's name, the kernel's limit
_RAYS_SOCKET = "/r/session_2026-01-31_23-59-59_123456_1234567/sockets/plasma_store"
_LONGEST_PARENT = _SOCKET_BYTES - len(f"/{PREFIX}12345678{_RAYS_SOCKET}")


@contextmanager
def folder_of_job(prefix: str = PREFIX, parent: Path | None = None) -> Iterator[tuple[str, int]]:
    """A new folder, until the block is left; those of dead jobs are removed first.

    Args:
        prefix: of the folders' names, by which those of dead jobs are known.
        parent: in which they are; None: the folder of temporary files.

    Yields:
        Its path, and the open file of its lock. The job counts as alive as long as any process has
        that open: hand it to those that use the folder.

    Raises:
        ValueError: nothing can be made in the folder of temporary files.
        OSError: nothing can be made in `parent`.
    """
    of_sockets = parent is None
    parent = parent or Path(_short_folder())
    for other in parent.glob(f"{prefix}*"):
        _lives(other, fcntl.LOCK_EX, if_dead=shutil.rmtree)
    try:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    except OSError as error:
        raise (_no_folder(error) if of_sockets else error) from None
    lock = lock_in(folder, _LOCK, socket.gethostname())
    try:
        yield str(folder), lock
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def folders_of_living_jobs(prefix: str = PREFIX, parent: Path | None = None) -> list[Path]:
    """Return the folders of this user's jobs that live on this host.

    Args:
        prefix: of the folders' names.
        parent: in which they are; None: the folder of temporary files.
    """
    parent = parent or Path(_short_folder())
    folders = sorted(parent.glob(f"{prefix}*"))
    return [one for one in folders if _lives(one, fcntl.LOCK_SH)]  # shared: others may look, too


def _lives(folder: Path, kind: int, if_dead: Callable[[Path], None] = lambda folder: None) -> bool:
    """Whether a job of this user on this host lives; something may be done where it is dead."""
    with suppress(OSError):  # not ours to read, or gone by now
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            return False
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
        try:
            if os.read(lock, 256).decode(errors="replace") != socket.gethostname():
                return False
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
            if_dead(folder)
        except BlockingIOError:
            return True
        finally:
            os.close(lock)
    return False


def _short_folder() -> str:
    """That of temporary files, unless its name is too long for those of sockets below it.

    Raises:
        ValueError: no folder for temporary files can be written.
    """
    try:
        folder = tempfile.gettempdir()
    except OSError as error:
        raise _no_folder(error) from None
    return folder if len(os.fsencode(folder)) <= _LONGEST_PARENT else _SHORT


def _no_folder(error: OSError) -> ValueError:
    return ValueError(
        f"found TMPDIR={os.environ.get('TMPDIR', '')!r} and no room in it or in {_SHORT} for a "
        f"folder of Ray's sockets ({error}), expected one: set TMPDIR to a folder of yours whose "
        f"name has at most {_LONGEST_PARENT} bytes, as names of sockets end at {_SOCKET_BYTES}"
    )


def lock_in(folder: Path, name: str, text: str = "") -> int:
    """Make a file and lock it; who sees it under its name finds it locked."""
    unnamed = folder / f"{name}.new"
    lock = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.write(lock, text.encode())
    unnamed.rename(folder / name)
    return lock

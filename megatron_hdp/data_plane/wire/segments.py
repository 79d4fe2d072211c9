"""Files in shared memory that hold steps: one process of a node writes them, its ranks map them.

A segment appears whole, under its name, and never changes afterwards. Ranks map it copy-on-write:
they share its memory until one of them writes to a page, which is then its own. Removing a segment
takes its name away; its memory is free when the last rank that maps it has let go.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock

from megatron_hdp.files import is_named

_FOLDER_MODE, _FILE_MODE = 0o700, 0o600
_NAME = re.compile(r"[a-z0-9-]{1,120}")
_LACK_OF_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)


class SegmentFolder:
    """The segments of one node, in a folder that only its owner can enter."""

    def __init__(self, path: Path) -> None:
        """Open a folder that is there, to attach segments of it; see `make` for the other side.

        Raises:
            FileNotFoundError: it is not there.
            ValueError: it is no folder, or others than this user may enter it.
        """
        self.path = Path(os.path.abspath(path))
        self._folder = _open_folder(self.path)
        self._is_made_here = False
        self._lock = Lock()
        self._num_bytes: dict[str, int] = {}

    @classmethod
    def make(cls, name: str, parent: Path) -> SegmentFolder:
        """Make a folder, or empty the one that a killed process left behind, to create segments.

        Args:
            name: of lower-case letters, digits and hyphens.
            parent: a folder, on a file system that lies in memory.

        Raises:
            ValueError: the folder cannot be made, is not this user's, or a living process has it.
        """
        path = parent / _checked(name, "a folder of segments")
        try:
            with suppress(FileExistsError):
                path.mkdir(mode=_FOLDER_MODE)
        except OSError as error:
            raise ValueError(
                f"{path}: found that it cannot be made ({error.strerror}), expected a folder in "
                "shared memory for steps: make room, or name another parent"
            ) from None
        made = cls(path)
        try:
            fcntl.flock(made._folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not is_named(made._folder, path):  # its owner has removed it in between
                made.close()
                return cls.make(name, parent)
        except BlockingIOError:
            made.close()
            raise ValueError(
                f"{path}: found a living process that writes steps there, expected none: let it "
                "end first, or give this one another name"
            ) from None
        made._is_made_here = True
        made._empty()
        return made

    @property
    def num_bytes(self) -> int:
        """What the segments take that were created here and not removed."""
        with self._lock:
            return sum(self._num_bytes.values())

    @contextmanager
    def create(self, name: str, num_bytes: int) -> Iterator[memoryview]:
        """Give a buffer to write in; the segment appears when the block ends without an exception.

        Args:
            name: of lower-case letters, digits and hyphens; a new one.
            num_bytes: of the segment.

        Raises:
            ValueError: there is no room in shared memory.
        """
        assert self._is_made_here, f"{self.path} is another process's"
        part = _checked(name, "a segment") + ".part"
        with self._lock:
            assert name not in self._num_bytes, f"{name} is there, and a segment never changes"
            try:
                mapped = self._map_new(part, num_bytes)
                buffer = memoryview(mapped)
                yield buffer
                buffer.release()
                mapped.close()
                os.rename(part, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
            except BaseException:
                with suppress(OSError):
                    os.unlink(part, dir_fd=self._folder)
                raise
            self._num_bytes[name] = num_bytes

    def remove(self, name: str) -> None:
        """Take a segment's name away; one that is not there is no mistake."""
        assert self._is_made_here, f"{self.path} is another process's"
        with self._lock:
            if self._folder < 0:
                return  # nothing is left
            with suppress(FileNotFoundError):
                os.unlink(_checked(name, "a segment"), dir_fd=self._folder)
            self._num_bytes.pop(name, None)

    def attach(self, name: str) -> mmap.mmap:
        """Map a segment copy-on-write: writing to it changes this process's memory alone.

        Raises:
            FileNotFoundError: it was removed.
            ValueError: it is not a segment of this folder, or not this user's alone.
        """
        full = self.path / _checked(name, "a segment")
        try:
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self._folder)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                error.errno,
                "found no segment, expected the step that was announced there: it was removed; "
                "ask for the step again",
                str(full),
            ) from None
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise ValueError(
                f"{full}: found a symbolic link, expected a segment: remove it"
            ) from None
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):
                raise ValueError(f"{full}: found no regular file, expected a segment: remove it")
            require_private(full, found)
            return mmap.mmap(file, found.st_size, access=mmap.ACCESS_COPY)
        finally:
            os.close(file)

    def close(self) -> None:
        """Let go of the folder; the process that made it removes it with all that is in it.

        What is being written is waited for, and nothing is begun any more.
        """
        with self._lock:
            if self._folder < 0:
                return
            if self._is_made_here:
                self._empty()
                with suppress(FileNotFoundError):
                    self.path.rmdir()
            os.close(self._folder)
            self._folder = -1

    def _map_new(self, part: str, num_bytes: int) -> mmap.mmap:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        file = -1
        try:
            file = os.open(part, flags, _FILE_MODE, dir_fd=self._folder)
            os.fchmod(file, _FILE_MODE)  # whatever the umask is
            os.posix_fallocate(file, 0, num_bytes)  # a write beyond the room would kill with SIGBUS
            return mmap.mmap(file, num_bytes)
        except OSError as error:
            if error.errno not in _LACK_OF_ROOM:
                raise
            room = os.fstatvfs(self._folder)
            raise ValueError(
                f"{self.path}: found no room for a step ({error.strerror}; "
                f"{room.f_bavail * room.f_frsize:,} bytes are free), expected {num_bytes:,} bytes: "
                "give the node more shared memory (a container's is set by --shm-size), or prepare "
                "fewer steps ahead"
            ) from None
        finally:
            if file >= 0:
                os.close(file)

    def _empty(self) -> None:
        for name in os.listdir(self._folder):
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._folder)
        self._num_bytes.clear()


def _checked(name: str, what: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"found the name {name!r} for {what}, expected lower-case letters, digits and hyphens "
            "only, 1 to 120 of them"
        )
    return name


def _open_folder(path: Path) -> int:
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(
            f"{path}: found no folder of this user ({error.strerror}), expected one that holds "
            "steps: remove it, or name another one"
        ) from None
    try:
        require_private(path, os.fstat(folder))
    except ValueError:
        os.close(folder)
        raise
    return folder


def require_private(path: Path, found: os.stat_result) -> None:
    """Refuse what belongs to another user, or what others may enter, read or change."""
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid == os.geteuid() and not mode & 0o077:
        return
    raise ValueError(
        f"{path}: found it with owner {found.st_uid} and mode {mode:04o}, expected owner "
        f"{os.geteuid()} and no permission for others: another user could read or change the "
        "data; remove it, or name another one"
    )

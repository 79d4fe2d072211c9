"""A table of sequences as a file: written once, then mapped read-only by every process of a node.

The first page is that of `data.mapped_file`; then come the columns of `Columns`, each from a
multiple of 4096 on, one of 2 MiB or more from a multiple of 2 MiB on.

**Large pages.** A process's first step touches the column of lengths at as many places as it has
sequences. In pages of 4 KiB that is a page fault for nearly every 64 KiB: 12,000 at 200M rows. So
columns are written in whole 2 MiB, which file systems with large pages (ext4 since Linux 6.16, XFS)
keep as one page in memory and map by one fault. ``MADV_HUGEPAGE`` asks for the same where the file
is read again from the disk.
"""

import errno
import mmap
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_hdp.data.mapped_file import PAGE, FileKind, write_at
from megatron_hdp.data.tables.columns import Column, Columns, TableFacts
from megatron_hdp.files import note_opened, put_in_place

VERSION = 3

_KIND = FileKind(b"HDPTABLE", VERSION)
_LARGE_PAGE = 1 << 21
_TYPES = ("<u4", "<i8")
_LACK_OF_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class TableCacheError(ValueError):
    """A table of sequences cannot be kept in the folder of caches; the message says why."""


@dataclass(frozen=True)
class TableOrigin:
    """What a table was made from."""

    index: str
    """Path of the ``.idx`` when it was made, for people."""
    mtime_ns: int
    """Time of the ``.idx`` when it was read."""
    content: str
    """XXH3 of the ``.idx``."""
    token_type: str
    """The numpy type of the tokens in the ``.bin``."""
    token_bytes: int
    """Least size of the ``.bin``."""


@dataclass(frozen=True)
class CachedTable:
    """A table that lies in a file."""

    facts: TableFacts
    origin: TableOrigin
    columns: Columns


class TableWriter:
    """Writes the file of a table beside its place: each column in order, then `publish`.

    A context manager: what is not published is removed. Whatever fails is a `TableCacheError`.
    """

    def __init__(self, path: Path, num_rows: int, types: dict[str, str]) -> None:
        """Make the file, of columns of these numpy types."""
        self._path = path
        self._types = types
        self._places, self._num_bytes = _places(num_rows, types)
        self._written = dict(self._places)  # where of each column the next byte belongs
        self._waiting = {name: bytearray() for name in types}
        self._new = path.with_name(f"{path.name}.tmp{os.getpid()}")
        with self._told():
            self._file = os.open(self._new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)

    def __enter__(self) -> "TableWriter":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)
        self._new.unlink(missing_ok=True)

    def put(self, name: str, first: int, values: Column) -> None:
        """Write values of a column from a row on, the next one after those put before."""
        waiting = self._waiting[name]
        if self._places[name] + first * values.itemsize != self._written[name] + len(waiting):
            raise ValueError(f"column {name} goes on at another row than {first:,}")
        waiting += values.data.cast("B")
        if len(waiting) >= _LARGE_PAGE:
            self._write(name, len(waiting) // _LARGE_PAGE * _LARGE_PAGE)

    def publish(self, facts: TableFacts, origin: TableOrigin) -> None:
        """Write the description, wait until everything lies on the disk, and give it its name."""
        for name, waiting in self._waiting.items():
            self._write(name, len(waiting))
        with self._told():
            os.ftruncate(self._file, self._num_bytes)
            about = {"columns": self._types, "facts": asdict(facts), "origin": asdict(origin)}
            _KIND.describe(self._file, about)
            os.fchmod(self._file, 0o444)
            put_in_place(self._new, self._path, durable=True)

    def _write(self, name: str, count: int) -> None:
        """Write the first bytes of a column that wait."""
        data = memoryview(self._waiting[name])
        self._waiting[name] = bytearray(data[count:])
        with self._told():
            write_at(self._file, data[:count], self._written[name])
        self._written[name] += count

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise unusable(self._path.parent, error, self._num_bytes) from None


def read_table(path: Path) -> CachedTable:
    """Map the table in a file, whose opening is noted.

    Raises:
        FileNotFoundError: there is none.
        DamagedFileError: the file is no whole table of this version.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        note_opened(file)
        about, mapped = _KIND.map(file, lambda about: _parsed(about)[-1])
    finally:
        os.close(file)
    with suppress(AttributeError, OSError):  # not Linux, or a kernel without large pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    facts, origin, types, places, _ = _parsed(about)
    columns: dict[str, Any] = {
        name: np.frombuffer(mapped, dtype=dtype, count=facts.num_sequences, offset=places[name])
        for name, dtype in types.items()
    }
    return CachedTable(facts, origin, Columns(**columns))


def _parsed(
    about: Mapping[str, Any],
) -> tuple[TableFacts, TableOrigin, dict[str, str], dict[str, int], int]:
    """Return what a description says: also each column's type and place, and the file's size."""
    facts, origin = TableFacts(**about["facts"]), TableOrigin(**about["origin"])
    types = dict(about["columns"])
    return facts, origin, types, *_places(int(facts.num_sequences), types)


def _places(num_rows: int, types: dict[str, str]) -> tuple[dict[str, int], int]:
    """Return where each column begins, and where the last one ends."""
    places, end = {}, PAGE
    for name, dtype in types.items():
        if dtype not in _TYPES:
            raise ValueError(f"column {name} of type {dtype}")
        num_bytes = num_rows * np.dtype(dtype).itemsize
        unit = _LARGE_PAGE if num_bytes >= _LARGE_PAGE else PAGE
        places[name] = -(-end // unit) * unit
        end = places[name] + num_bytes
    return places, end


def unusable(folder: Path, error: OSError, num_bytes: int = 0) -> TableCacheError:
    """Return what to say of the system's error when a file of so many bytes was written."""
    found = error.strerror or str(error)
    if error.errno in _LACK_OF_ROOM:
        return TableCacheError(
            f"--data-cache-path {folder}: found no room for a table of sequences ({found}; "
            f"{shutil.disk_usage(folder).free:,} bytes are free), expected {num_bytes:,} bytes: "
            "make room, or name a folder on another disk"
        )
    return TableCacheError(
        f"--data-cache-path {folder}: found a folder that cannot be used ({found}), expected a "
        "folder to keep tables of sequences in: change its permissions or name another one"
    )

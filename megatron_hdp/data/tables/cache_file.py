"""A table of sequences as a file: written once, then mapped read-only by every process of a node.

Layout (little endian): 8 bytes magic, ``uint32`` version, ``uint32`` size of the description,
``uint64`` XXH3 of the description, the description (JSON), zeros up to byte 4096, then the columns
of `Columns`, each from a multiple of 4096 on, one of 2 MiB or more from a multiple of 2 MiB on. A
file is never changed in place: where a mapped file shrinks, the kernel kills whoever touches what
is gone.

**Large pages.** A process's first step touches the column of lengths at as many places as it has
sequences. In pages of 4 KiB that is a page fault for nearly every 64 KiB: 12,000 at 200M rows. So
columns are written in whole 2 MiB, which file systems with large pages (ext4 since Linux 6.16, XFS)
keep as one page in memory and map by one fault. ``MADV_HUGEPAGE`` asks for the same where the file
is read again from the disk.
"""

import errno
import json
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megatron_hdp.data.cache_use import hold
from megatron_hdp.data.content import sampled
from megatron_hdp.data.tables.facts import TableFacts
from megatron_hdp.data.tables.filling import Column, Columns
from megatron_hdp.data.tables.folder import unusable

VERSION = 2

_MAGIC = b"HDPTABLE"
_HEAD = struct.Struct("<8sIIQ")
_PAGE = 4096
_LARGE_PAGE = 1 << 21
_NUM_SAMPLES = 16
_TYPES = ("<u4", "<i8")


class DamagedTableError(Exception):
    """A file that is no whole table of this version; says why, as what is said of the file."""


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
        """Make the file.

        Args:
            path: where the table will lie.
            num_rows: of the table.
            types: numpy type of each column.
        """
        self._path = path
        self._types = types
        self._places, self._num_bytes = _places(num_rows, types)
        self._waiting = {name: _Waiting(place) for name, place in self._places.items()}
        self._new = path.with_name(f"{path.name}.{os.getpid()}")
        with self._told():
            self._file = os.open(self._new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)

    def __enter__(self) -> "TableWriter":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)
        self._new.unlink(missing_ok=True)

    def put(self, name: str, first: int, values: Column) -> None:
        """Write values of a column from a row on, the next one after those put before."""
        column = self._waiting[name]
        if self._places[name] + first * values.itemsize != column.end:
            raise ValueError(f"column {name} goes on at another row than {first:,}")
        column.add(values.data.cast("B"))
        if len(column) >= _LARGE_PAGE:
            self._write(*column.take(len(column) // _LARGE_PAGE * _LARGE_PAGE))

    def publish(self, facts: TableFacts, origin: TableOrigin) -> None:
        """Write the description, wait until everything lies on the disk, and give it its name."""
        for column in self._waiting.values():
            self._write(*column.take(len(column)))
        with self._told():
            os.ftruncate(self._file, self._num_bytes)
        text = json.dumps(
            {
                "columns": self._types,
                "samples": _samples(self._file, self._num_bytes),
                "facts": asdict(facts),
                "origin": asdict(origin),
            },
            indent=1,
        ).encode()
        head = _HEAD.pack(_MAGIC, VERSION, len(text), xxhash.xxh3_64_intdigest(text))
        if len(head) + len(text) > _PAGE:
            raise ValueError(
                f"the path {origin.index[:60]}... is too long for a table's first page"
            )
        self._write(memoryview(head + text), 0)
        with self._told():
            os.fchmod(self._file, 0o444)
            os.fsync(self._file)
            os.replace(self._new, self._path)
            _sync(self._path.parent)

    def _write(self, data: memoryview, place: int) -> None:
        """Written, not mapped: a full disk is an error of a write, and a signal of a mapping."""
        with self._told():
            while len(data):
                count = os.pwrite(self._file, data, place)
                data, place = data[count:], place + count

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise unusable(self._path.parent, error, self._num_bytes) from None


class _Waiting:
    """What was put into a column and is not written yet."""

    def __init__(self, place: int) -> None:
        self._place = place
        self._bytes = bytearray()

    def __len__(self) -> int:
        return len(self._bytes)

    @property
    def end(self) -> int:
        """Where the next byte belongs."""
        return self._place + len(self._bytes)

    def add(self, data: memoryview) -> None:
        self._bytes += data

    def take(self, count: int) -> tuple[memoryview, int]:
        """Return the first bytes, which wait no longer, and where they belong."""
        data, place = memoryview(self._bytes), self._place
        self._bytes = bytearray(data[count:])
        self._place += count
        return data[:count], place


def read_table(path: Path) -> CachedTable:
    """Map the table in a file, which is held until the last of its columns is let go of.

    Raises:
        FileNotFoundError: there is none.
        DamagedTableError: the file is no whole table of this version.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if not hold(file):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        said = _described(os.pread(file, _PAGE, 0))
        num_bytes = os.fstat(file).st_size
        try:
            facts, origin = TableFacts(**said["facts"]), TableOrigin(**said["origin"])
            types, num_rows = dict(said["columns"]), int(facts.num_sequences)
            places, expected = _places(num_rows, types)
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedTableError(f"has an unknown description ({error!r})") from None
        if num_bytes != expected:
            raise DamagedTableError(f"has {num_bytes:,} bytes, expected {expected:,}")
        if _samples(file, num_bytes) != said.get("samples"):
            raise DamagedTableError("has other bytes than were written")
        mapped = mmap.mmap(file, num_bytes, prot=mmap.PROT_READ)  # has a descriptor of its own
    finally:
        os.close(file)
    with suppress(AttributeError, OSError):  # not Linux, or a kernel without large pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    columns: dict[str, Any] = {
        name: np.frombuffer(mapped, dtype=dtype, count=num_rows, offset=places[name])
        for name, dtype in types.items()
    }
    mapped_columns = Columns(columns["begin"], columns["length"], columns.get("document"))
    return CachedTable(facts, origin, mapped_columns)


def _described(page: bytes) -> dict[str, Any]:
    """Return the description on the first page of a file."""
    if len(page) < _PAGE:
        raise DamagedTableError(f"has {len(page):,} bytes, its first page alone takes {_PAGE:,}")
    magic, version, size, digest = _HEAD.unpack_from(page)
    if magic != _MAGIC or version != VERSION:
        raise DamagedTableError(f"begins with {magic!r}, version {version}, expected {VERSION}")
    text = page[_HEAD.size : _HEAD.size + size]
    if len(text) != size or xxhash.xxh3_64_intdigest(text) != digest:
        raise DamagedTableError("has a damaged description")
    said = json.loads(text)
    if not isinstance(said, dict):
        raise DamagedTableError("has an unknown description")
    return said


def _places(num_rows: int, types: dict[str, str]) -> tuple[dict[str, int], int]:
    """Return where each column begins, and where the last one ends."""
    places, end = {}, _PAGE
    for name, dtype in types.items():
        if dtype not in _TYPES:
            raise ValueError(f"column {name} of type {dtype}")
        num_bytes = num_rows * np.dtype(dtype).itemsize
        unit = _LARGE_PAGE if num_bytes >= _LARGE_PAGE else _PAGE
        places[name] = -(-end // unit) * unit
        end = places[name] + num_bytes
    return places, end


def _samples(file: int, num_bytes: int) -> str:
    """Return a digest of samples of the columns: it tells zeros and pieces of another file."""
    return xxhash.xxh3_64_hexdigest(sampled(file, _PAGE, num_bytes, _NUM_SAMPLES))


def _sync(folder: Path) -> None:
    """Wait until the names in a folder lie on the disk."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)

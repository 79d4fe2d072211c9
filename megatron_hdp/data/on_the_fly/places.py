"""Where the records of one file begin, as a file that is made once and mapped by many processes.

Layout (little endian): 8 bytes magic, ``uint32`` version, ``uint32`` size of the description,
``uint64`` XXH3 of the description, the description (JSON), zeros up to byte 4096, then the places
and, of a table, the number of the first record of each of its parts.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from megatron_hdp.arrays import Int64Array
from megatron_hdp.data.content import sampled
from megatron_hdp.data.formats import require_text, table_parts
from megatron_hdp.data.token_writer import sync

VERSION = 1
_MAGIC = b"HDPPLACE"
_HEAD = struct.Struct("<8sIIQ")
_PAGE = 4096
_NUM_SAMPLES = 16
_BLOCK_BYTES = 2**24
_NEWLINE = 10
_IS_SPACE = np.zeros(256, dtype=np.bool_)
_IS_SPACE[list(b" \t\n\r\v\f")] = True

Tell = Callable[[int], object]


@dataclass(frozen=True)
class _Facts:
    num_records: int
    num_places: int
    dtype: str
    """Of the places."""
    has_parts: bool


@dataclass(frozen=True)
class Places:
    """Of the records of a file."""

    num_records: int
    places: npt.NDArray[np.integer]
    """Byte at which each line that is not blank begins; of each part of a table its place."""
    firsts: Int64Array | None
    """Number of the first record of each part; None where every record has a place."""
    num_bytes: int
    """Of the file that holds this."""


def places_path(folder: Path, path: str, layout: str, size: int, mtime_ns: int) -> Path:
    """Return where the places in a file lie: named by its size, time and samples of its content."""
    digest = xxhash.xxh3_128(json.dumps((VERSION, layout, size, mtime_ns)).encode())
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        digest.update(sampled(file, 0, size, _NUM_SAMPLES))
    finally:
        os.close(file)
    return folder / f"records-{digest.hexdigest()}.places"


def read_places(path: Path) -> Places | None:
    """Map what was written; None if it is not there, not whole or of another version."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        num_bytes = os.fstat(file).st_size
        page = os.pread(file, _PAGE, 0)
        if len(page) < _PAGE:
            return None
        magic, version, size, digest = _HEAD.unpack_from(page)
        text = page[_HEAD.size : _HEAD.size + size]
        if (magic, version) != (_MAGIC, VERSION) or xxhash.xxh3_64_intdigest(text) != digest:
            return None
        said = json.loads(text)
        facts = _Facts(**said["facts"])
        begin = _PAGE + facts.num_places * np.dtype(facts.dtype).itemsize
        expected = begin + (8 * facts.num_places if facts.has_parts else 0)
        if num_bytes != expected or _samples(file, num_bytes) != said["samples"]:
            return None
        mapped = mmap.mmap(file, num_bytes, prot=mmap.PROT_READ)
    finally:
        os.close(file)
    places = np.frombuffer(mapped, facts.dtype, facts.num_places, _PAGE)
    firsts = None
    if facts.has_parts:
        firsts = np.frombuffer(mapped, "<i8", facts.num_places, begin)
    return Places(facts.num_records, places, firsts, num_bytes)


def write_places(
    target: Path,
    path: str,
    layout: str,
    *,
    size: int,
    key: str | None,
    tell: Tell,
    check: Callable[[], None],
) -> None:
    """Look for the records of a file, and keep their places: all of them or nothing.

    Args:
        target: where they will lie.
        path: the file.
        layout: ``lines``, ``parquet`` or ``arrow``.
        size: of the file.
        key: of the text; None: rows are wanted.
        tell: is told how many more bytes have been read.
        check: raises if the file has changed.

    Raises:
        ValueError: the file is damaged, or no text.
        OSError: there is no room, for one.
    """
    temporary = f"{target}.tmp{os.getpid()}"
    dtype = "<u4" if size < 2**32 else "<u8"
    firsts: list[int] = []
    num_records = num_places = 0
    try:
        with open(temporary, "w+b") as stream:
            stream.seek(_PAGE)
            if layout == "lines":
                require_text(path)
                for begins in line_begins(path, tell):
                    stream.write(begins.astype(dtype).tobytes())
                    num_places += len(begins)
                num_records = num_places
            else:
                for part in table_parts(path, layout, key):
                    stream.write(np.array([part.place], dtype=dtype).tobytes())
                    firsts.append(num_records)
                    num_places += 1
                    num_records += part.num_rows
                stream.write(np.array(firsts, dtype="<i8").tobytes())
                tell(size)
            stream.truncate(max(stream.tell(), _PAGE))
            stream.flush()
            facts = _Facts(num_records, num_places, dtype, layout != "lines")
            samples = _samples(stream.fileno(), stream.tell())
            text = json.dumps({"facts": asdict(facts), "samples": samples, "of": path[-1024:]})
            raw = text.encode()
            head = _HEAD.pack(_MAGIC, VERSION, len(raw), xxhash.xxh3_64_intdigest(raw)) + raw
            assert len(head) <= _PAGE
            stream.seek(0)
            stream.write(head.ljust(_PAGE, b"\0"))
        check()
        sync(temporary)
        os.replace(temporary, target)
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)


def line_begins(path: str, tell: Tell) -> Iterator[Int64Array]:
    """Yield the bytes at which the lines of a file begin that are not blank, piece by piece."""
    block = np.empty(_BLOCK_BYTES, dtype=np.uint8)
    place, is_begin = 0, True  # whether a line begins at the place
    with open(path, "rb", buffering=0) as stream:
        while count := stream.readinto(block.data):
            view = block[:count]
            begins = np.flatnonzero(view == _NEWLINE) + 1
            if is_begin:
                begins = np.concatenate([[0], begins])
            is_begin = view[-1] == _NEWLINE
            if is_begin:
                begins = begins[:-1]
            begins = begins[view[begins] != _NEWLINE]
            is_blank = _IS_SPACE[view[begins]]
            for i in np.flatnonzero(is_blank):
                is_blank[i] = _is_blank(stream.fileno(), place + int(begins[i]))
            yield begins[~is_blank] + place
            place += count
            tell(count)


def _is_blank(file: int, at: int) -> bool:
    """Whether nothing but white space stands in the line that begins at a byte."""
    while raw := os.pread(file, _PAGE, at):
        line, newline, _ = raw.partition(b"\n")
        if line and not line.isspace():
            return False
        if newline:
            return True
        at += len(raw)
    return True


def _samples(file: int, num_bytes: int) -> str:
    return xxhash.xxh3_64_hexdigest(sampled(file, _PAGE, num_bytes, _NUM_SAMPLES))

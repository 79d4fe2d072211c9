"""JSON lines, plain ones from any byte on, compressed ones from the start: an object a line."""

import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import numpy as np
import orjson

from megatron_hdp.arrays import Int64Array
from megatron_hdp.data.extras import import_extra
from megatron_hdp.data.formats.records import BadRecord, Format, Origin, Piece, Record
from megatron_hdp.data.formats.texts import require_text

_BUFFER_BYTES = 2**20
_MOST_SNIFFED = 2**24
_BLOCK_BYTES, _PAGE = 2**24, 4096
_NEWLINE = 10
_IS_SPACE = np.zeros(256, dtype=np.bool_)
_IS_SPACE[list(b" \t\n\r\v\f")] = True


class Lines(Format):
    """A plain file of JSON lines, which can be read from any byte on."""

    name = "lines"
    suffixes = (".jsonl", ".ndjson")

    def pieces(self, path: str, size: int, piece_bytes: int) -> list[Piece]:
        """Cut the file anywhere: a line belongs to the piece in which it begins."""
        starts = range(0, max(size, 1), piece_bytes)
        ends = [*starts[1:], size]
        return [Piece(path, self.name, i, j, j - i) for i, j in zip(starts, ends, strict=True)]

    def read(self, piece: Piece, key: str | None) -> Iterator[Record | BadRecord]:
        """Yield the documents of lines that begin in the piece."""
        yield from _documents(_plain(piece), line_origin(piece.path, piece.begin), key)

    def begins(self, path: str, tell: Callable[[int], object]) -> Iterator[Int64Array]:
        """Yield the bytes at which the lines begin that are not blank; tells how many were read.

        Raises:
            ValueError: the file is no text.
        """
        require_text(path)
        return line_begins(path, tell)


class CompressedLines(Format):
    """A compressed file of JSON lines, which can be read from its beginning only."""

    def __init__(self, name: str, suffixes: tuple[str, ...]) -> None:
        """Take the name of the compression."""
        self.name, self.suffixes = name, suffixes

    def read(self, piece: Piece, key: str | None) -> Iterator[Record | BadRecord]:
        """Yield the documents of all lines."""
        yield from _documents(_unpacked(piece), Origin(piece.path, "line"), key)


def line_begins(path: str, tell: Callable[[int], object]) -> Iterator[Int64Array]:
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


def holds_json_lines(path: str, key: str) -> bool:
    """Whether the first line that says something is an object with a text under ``key``."""
    with open(path, "rb") as stream:
        line = next(
            (line for line in iter(lambda: stream.readline(_MOST_SNIFFED), b"") if line.strip()),
            b"",
        )
    try:
        found = _parsed(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and isinstance(found.get(key), str)


def _documents(
    lines: Iterator[tuple[bytes, int]], origin: Origin, key: str | None
) -> Iterator[Record | BadRecord]:
    for number, (line, num_bytes) in enumerate(lines, start=1):
        if not line.isspace():
            yield record_of_line(line, num_bytes, origin, number, key)


def record_of_line(
    line: bytes, num_bytes: int, origin: Origin, number: int, key: str | None
) -> Record | BadRecord:
    """Return the document of a line that is not blank; its number counts from 1."""
    try:
        row = _parsed(line)
    except (ValueError, RecursionError) as error:
        return BadRecord(
            f"{origin.where(number)}: expected one JSON object, found {_excerpt(line)} ({error})",
            num_bytes,
        )
    value = row.get(key) if key is not None and isinstance(row, dict) else row
    if isinstance(value, dict if key is None else str):
        return Record(value, num_bytes, origin, number)
    expected, remedy = "one JSON object", ""
    if key is not None:
        expected = f"a JSON object with a string under {key!r}"
        remedy = "; name the key (--json-key, or key of a source)"
    message = f"{origin.where(number)}: expected {expected}, found {_excerpt(line)}{remedy}"
    return BadRecord(message, num_bytes)


def _parsed(line: bytes) -> Any:
    """Parse a line; what is too lax for orjson (NaN, half a surrogate pair) json may still take."""
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        lax = json.dumps(json.loads(line), ensure_ascii=False)
        return json.loads(lax.encode("utf-8", errors="replace"))


def _plain(piece: Piece) -> Iterator[tuple[bytes, int]]:
    """Yield the lines that begin in the piece, with their sizes."""
    if piece.begin == 0:
        require_text(piece.path)
    with open(piece.path, "rb", buffering=_BUFFER_BYTES) as stream:
        place = _seek_line(stream, piece.begin)
        while place < piece.end and (line := stream.readline()):
            place += len(line)
            yield line, len(line)


def _seek_line(stream: BinaryIO, begin: int) -> int:
    """Go to the first line that begins at a byte or after it, and return where that is."""
    if begin == 0:
        return 0
    stream.seek(begin - 1)
    return begin - 1 + len(stream.readline())


def line_origin(path: str, begin: int) -> Origin:
    """Return where the lines lie that begin from a byte of a plain file on.

    Those before them are counted only if one has to be named.
    """

    def before() -> int:
        with open(path, "rb", buffering=_BUFFER_BYTES) as stream:
            return _num_lines(stream, _seek_line(stream, begin))

    return Origin(path, "line", before)


def _num_lines(stream: BinaryIO, num_bytes: int) -> int:
    """Count the lines that end in the first bytes of a file."""
    stream.seek(0)
    count = 0
    while num_bytes and (block := stream.read(min(num_bytes, _BUFFER_BYTES))):
        count += block.count(b"\n")
        num_bytes -= len(block)
    return count


def _unpacked(piece: Piece) -> Iterator[tuple[bytes, int]]:
    """Yield the lines of a compressed file, each with the compressed bytes read for it."""
    num_lines = num_read = 0
    with open(piece.path, "rb") as raw:
        try:
            for line in _decompressed(raw, piece.format):
                num_lines += 1
                num_bytes, num_read = raw.tell() - num_read, raw.tell()
                yield line, num_bytes
        except (EOFError, OSError, zlib.error) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise ValueError(
                f"{piece.path} cannot be decompressed after line {num_lines} ({error}), expected a "
                f"whole {piece.format} file: copy it again"
            ) from error


def _decompressed(raw: io.BufferedReader, name: str) -> io.BufferedIOBase:
    if name == "gzip":
        return io.BufferedReader(gzip.GzipFile(fileobj=raw), _BUFFER_BYTES)
    pyarrow = import_extra("pyarrow", raw.name)
    return io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd"), _BUFFER_BYTES)


def _excerpt(line: bytes) -> str:
    text = line.decode("utf-8", errors="replace").strip()
    return repr(text if len(text) <= 60 else text[:60] + "...")

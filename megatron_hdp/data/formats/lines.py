"""JSON lines, plain ones from any byte on, compressed ones from the start: an object a line."""

import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import numpy as np
import orjson

from megatron_hdp.arrays import Int64Array
from megatron_hdp.data.characters import half_pair
from megatron_hdp.data.extras import import_extra
from megatron_hdp.data.formats.records import BadRecord, Format, Origin, Piece, Record
from megatron_hdp.data.formats.texts import require_text

_BUFFER_BYTES = 2**20
_UNPACKED_BYTES = 2**12  # at a time: what lies before a damage by less is not lost
_MOST_SNIFFED = 2**24
_HEAD_BYTES = 8192
_ARRAY = re.compile(rb'(?:\xef\xbb\xbf)?\s*\[\s*[\[{"\]]')
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
    """Whether a file begins with an object with a text under ``key``, or with two, a line each."""
    with open(path, "rb") as stream:
        lines = filter(bytes.strip, iter(lambda: stream.readline(_MOST_SNIFFED), b""))
        first = _object(next(lines, b""))
        if first is None or isinstance(first.get(key), str):
            return first is not None
        return _object(next(lines, b"")) is not None


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        found, _ = _parsed(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def require_no_array(path: str, head: bytes | None = None) -> None:
    """Refuse a file that is one array, of records or texts, by how it begins.

    Raises:
        ValueError: so it is.
    """
    if head is None:
        with open(path, "rb") as stream:
            head = stream.read(_HEAD_BYTES)
    if _ARRAY.match(head):
        name = path.removesuffix(".gz").removesuffix(".zst").removesuffix(".json")
        raise ValueError(
            f"{path} is one JSON array, expected a JSON object in each line: write it so (jq -c "
            f"'.[]' {path} > {name}.jsonl; of texts '.[] | {{text: .}}'), or leave it out by a glob"
        )


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
        row, is_lax = _parsed(line)
    except (ValueError, RecursionError) as error:
        return BadRecord(
            f"{origin.where(number)}: expected one JSON object, found {_excerpt(line)} ({error})",
            num_bytes,
        )
    value = row.get(key) if key is not None and isinstance(row, dict) else row
    if isinstance(value, dict if key is None else str):
        if is_lax and (half := half_pair(_text_of(value))):
            return BadRecord(
                f"{origin.where(number)}: found half a surrogate pair ({half}), expected text: it "
                "was cut within a character",
                num_bytes,
            )
        return Record(value, num_bytes, origin, number)
    expected, remedy = "one JSON object", ""
    if key is not None:
        expected = f"a JSON object with a string under {key!r}"
        remedy = "; name the key (--json-key, or key of a source)"
    message = f"{origin.where(number)}: expected {expected}, found {_excerpt(line)}{remedy}"
    return BadRecord(message, num_bytes)


def _parsed(line: bytes) -> tuple[Any, bool]:
    """Parse a line; what is too lax for orjson (NaN, half a surrogate pair) json may still take."""
    try:
        return orjson.loads(line), False
    except orjson.JSONDecodeError:
        return json.loads(line), True


def _text_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


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
            lines = _decompressed(raw, piece.format)
            require_no_array(piece.path, lines.peek()[:_HEAD_BYTES])
            for line in lines:
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


def _decompressed(raw: io.BufferedReader, name: str) -> io.BufferedReader:
    if name == "gzip":
        return io.BufferedReader(_AsItComes(gzip.GzipFile(fileobj=raw)), _BUFFER_BYTES)
    pyarrow = import_extra("pyarrow", raw.name)
    return io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd"), _UNPACKED_BYTES)


class _AsItComes(io.RawIOBase):
    """Gives what a stream has, so that an error comes after all that was whole."""

    def __init__(self, stream: io.BufferedIOBase) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        found = self._stream.read1(len(target))
        target[: len(found)] = found
        return len(found)


def _excerpt(line: bytes) -> str:
    text = line.decode("utf-8", errors="replace").strip()
    return repr(text if len(text) <= 60 else text[:60] + "...")

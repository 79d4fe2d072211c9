"""JSON lines, plain ones from any byte on, compressed ones from the start: an object a line."""

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

import orjson

from megatron_hdp.data.formats.extra import pyarrow_module
from megatron_hdp.data.formats.records import BadRecord, Origin, Piece, Record
from megatron_hdp.data.formats.texts import require_text

_BUFFER_BYTES = 2**20
_MOST_SNIFFED = 2**24


def read_lines(piece: Piece, key: str | None) -> Iterator[Record | BadRecord]:
    """Yield the documents of lines that begin in the piece.

    Args:
        piece: of a plain file (``lines``), or a whole compressed one (``gzip``, ``zstd``).
        key: of the text; None: the whole object is the value.

    Raises:
        ValueError: the file is no text, or what is compressed is damaged.
    """
    if piece.layout == "lines":
        yield from _documents(_plain(piece), _origin(piece), key)
    else:
        yield from _documents(_unpacked(piece), Origin(piece.path, "line"), key)


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
    """Return the document of a line that is not blank.

    Args:
        line: its bytes.
        num_bytes: that were read for it.
        origin: where it lies.
        number: of the line, from 1 on, as the origin counts.
        key: as of `read_lines`.
    """
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
    return BadRecord(_wrong(origin.where(number), line, key), num_bytes)


def _wrong(where: str, line: bytes, key: str | None) -> str:
    if key is None:
        return f"{where}: expected one JSON object, found {_excerpt(line)}"
    return (
        f"{where}: expected a JSON object with a string under {key!r}, found {_excerpt(line)}; "
        "name the key (--json-key, or key of a source)"
    )


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


def _origin(piece: Piece) -> Origin:
    """Lines before the piece are counted only if one of its lines has to be named."""

    def before() -> int:
        with open(piece.path, "rb", buffering=_BUFFER_BYTES) as stream:
            return _num_lines(stream, _seek_line(stream, piece.begin))

    return Origin(piece.path, "line", before)


def line_origin(path: str, begin: int) -> Origin:
    """Return where the line lies that begins at a byte of a plain file; its number there is 1."""

    def before() -> int:
        with open(path, "rb", buffering=_BUFFER_BYTES) as stream:
            return _num_lines(stream, begin)

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
            for line in _decompressed(raw, piece.layout):
                num_lines += 1
                num_bytes, num_read = raw.tell() - num_read, raw.tell()
                yield line, num_bytes
        except (EOFError, OSError, zlib.error) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise ValueError(
                f"{piece.path} cannot be decompressed after line {num_lines} ({error}), expected a "
                f"whole {piece.layout} file: copy it again"
            ) from error


def _decompressed(raw: io.BufferedReader, layout: str) -> io.BufferedIOBase:
    if layout == "gzip":
        return io.BufferedReader(gzip.GzipFile(fileobj=raw), _BUFFER_BYTES)
    pyarrow = pyarrow_module(raw.name)
    return io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd"), _BUFFER_BYTES)


def _excerpt(line: bytes) -> str:
    text = line.decode("utf-8", errors="replace").strip()
    return repr(text if len(text) <= 60 else text[:60] + "...")

"""How a file is laid out, into which pieces it falls, and what reads a piece."""

import os
from collections.abc import Iterator

from megatron_hdp.data.formats.lines import holds_json_lines, read_lines
from megatron_hdp.data.formats.records import BadRecord, Piece, Record
from megatron_hdp.data.formats.tables import read_rows, table_sizes
from megatron_hdp.data.formats.texts import read_text

_LINES = (".jsonl", ".ndjson")
_COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
_TABLES = {".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow", ".feather": "arrow"}


def layout_of(path: str, key: str | None, *, lines: bool) -> str:
    """Return how a file is laid out; arguments as of `pieces_of`."""
    stem, suffix = os.path.splitext(path.lower())
    lines = lines or key is None
    if suffix in _TABLES:
        return _TABLES[suffix]
    inner = os.path.splitext(stem)[1]
    if suffix in _COMPRESSED and (lines or inner in (*_LINES, ".json")):
        return _COMPRESSED[suffix]
    if suffix in _LINES or lines:
        return "lines"
    if suffix == ".json" and key is not None and holds_json_lines(path, key):
        return "lines"
    return "text"


def pieces_of(path: str, key: str | None, *, lines: bool, piece_bytes: int) -> list[Piece]:
    """Cut a file into pieces that can be read apart, in order.

    Args:
        path: the file; how it is laid out follows from its name, of a ``.json`` also from its
            first line.
        key: of the text; None: rows are wanted.
        lines: whether what is no table by its name holds JSON lines, not one text.
        piece_bytes: about how much of the file a piece should take.

    Raises:
        ValueError: the file is damaged.
        ModuleNotFoundError: it is a table, and pyarrow is not installed.
    """
    layout = layout_of(path, key, lines=lines)
    size = os.path.getsize(path)
    if layout == "lines":
        starts = range(0, max(size, 1), piece_bytes)
        ends = [*starts[1:], size]
        return [Piece(path, layout, i, j, j - i) for i, j in zip(starts, ends, strict=True)]
    if layout in _TABLES.values():
        return _table_pieces(path, layout, size, piece_bytes)
    return [Piece(path, layout, 0, size, size)]


def read(piece: Piece, key: str | None) -> Iterator[Record | BadRecord]:
    """Yield the records of a piece in order; in the places of some there may be none.

    Args:
        piece: a part of a file.
        key: of the text in lines and tables; None: the value is the whole row.

    Raises:
        ValueError: the file as a whole is something else, or damaged.
        ModuleNotFoundError: it needs pyarrow, which is not installed.
    """
    if piece.layout == "text":
        return read_text(piece)
    if piece.layout in _TABLES.values():
        return read_rows(piece, key)
    return read_lines(piece, key)


def _table_pieces(path: str, layout: str, size: int, piece_bytes: int) -> list[Piece]:
    """Put neighbouring parts together until they are large enough."""
    sizes = table_sizes(path, layout)
    scale = size / (sum(sizes) or 1)
    pieces, begin, taken = [], 0, 0.0
    for end, part in enumerate(sizes, start=1):
        taken += part * scale
        if taken >= piece_bytes or end == len(sizes):
            pieces.append(Piece(path, layout, begin, end, int(taken)))
            begin, taken = end, 0.0
    return pieces

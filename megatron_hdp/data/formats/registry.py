"""All formats of files: which one a file has, into which pieces it falls, what reads a piece."""

import os
from collections.abc import Iterator

from megatron_hdp.data.formats.arrow import Arrow
from megatron_hdp.data.formats.lines import (
    CompressedLines,
    Lines,
    holds_json_lines,
    require_no_array,
)
from megatron_hdp.data.formats.parquet import Parquet
from megatron_hdp.data.formats.records import BadRecord, Format, Piece, Record
from megatron_hdp.data.formats.tables import Table
from megatron_hdp.data.formats.tars import Tar
from megatron_hdp.data.formats.texts import Text

_TEXT, _LINES = Text(), Lines()
_COMPRESSED = (CompressedLines("gzip", (".gz",)), CompressedLines("zstd", (".zst", ".zstd")))
_TABLES: tuple[Table, ...] = (Parquet(), Arrow())
_TAR = Tar()
_BY_NAME: dict[str, Format] = {
    one.name: one for one in (_TEXT, _LINES, *_COMPRESSED, *_TABLES, _TAR)
}


def table_of(path: str) -> Table | None:
    """Return the format of a file that is a table by its name, else None."""
    suffix = os.path.splitext(path.lower())[1]
    return next((table for table in _TABLES if suffix in table.suffixes), None)


def format_of(path: str, key: str | None, *, lines: bool) -> Format:
    """Return the format of a file; arguments as of `pieces_of`.

    Raises:
        ValueError: it is one JSON array by its beginning, where lines are expected or may be.
    """
    stem, suffix = os.path.splitext(path.lower())
    lines = lines or key is None
    if (table := table_of(path)) is not None:
        return table
    if key is None and suffix in _TAR.suffixes:
        return _TAR
    if key is None and (suffix == ".tgz" or os.path.splitext(stem)[1] in _TAR.suffixes):
        raise ValueError(f"{path} is a compressed tar, expected a plain one: unpack it")
    inner = os.path.splitext(stem)[1]
    for compressed in _COMPRESSED:
        if suffix in compressed.suffixes and (lines or inner in (*_LINES.suffixes, ".json")):
            return compressed
    if not (lines or suffix in (*_LINES.suffixes, ".json")):
        return _TEXT
    require_no_array(path)
    if suffix == ".json" and not lines:
        assert key is not None
        return _LINES if holds_json_lines(path, key) else _TEXT
    return _LINES


def pieces_of(path: str, key: str | None, *, lines: bool, piece_bytes: int) -> list[Piece]:
    """Cut a file into pieces of about a size that can be read apart, in order.

    Its format follows from its name, of a ``.json`` also from its first lines; what is no table
    holds JSON lines if `lines` says so, else one text. Without a key of the text, rows are wanted.

    Raises:
        ValueError: the file is damaged.
        ModuleNotFoundError: it is a table, and pyarrow is not installed.
    """
    return format_of(path, key, lines=lines).pieces(path, os.path.getsize(path), piece_bytes)


def read(piece: Piece, key: str | None) -> Iterator[Record | BadRecord]:
    """Yield the records of a piece in order; see `Format.read`."""
    return _BY_NAME[piece.format].read(piece, key)

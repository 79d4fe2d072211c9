"""Tables by pyarrow: Parquet by row groups, Arrow files and streams by record batches."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron_hdp.data.formats.extra import pyarrow_module
from megatron_hdp.data.formats.records import BadRecord, Origin, Piece, Record

_ROWS_AT_ONCE = 128  # documents may be long
_BUFFER_BYTES = 2**20
_FILE_MAGIC = b"ARROW1"


def table_sizes(path: str, layout: str) -> list[float]:
    """Return the relative sizes of a table's parts: row groups or record batches.

    Raises:
        ValueError: the file is damaged, or something else.
    """
    with named(path), opened(path, layout) as table:
        if layout == "parquet":
            groups = map(table.metadata.row_group, range(table.metadata.num_row_groups))
            return [float(group.total_byte_size) for group in groups]
        if is_file(path):
            return [1.0] * table.num_record_batches
        return [float(batch.nbytes) for batch in table]


def read_rows(piece: Piece, key: str | None) -> Iterator[Record | BadRecord]:
    """Yield the rows of the parts of a table.

    Args:
        piece: row groups or record batches of a file.
        key: the column of the text; None: whole rows.

    Raises:
        ValueError: there is no such column, it holds no text, or the file is damaged.
    """
    with named(piece.path), opened(piece.path, piece.layout) as table:
        schema = table.schema_arrow if piece.layout == "parquet" else table.schema
        if key is not None:
            require_text_column(piece.path, schema, key)
        if piece.layout == "parquet":
            before, batches = _row_groups(table, piece, key)
        else:
            before, batches = _record_batches(table, piece)
        yield from _records(batches, Origin(piece.path, "row", lambda: before), key, piece)


def _records(
    batches: Iterator[Any], origin: Origin, key: str | None, piece: Piece
) -> Iterator[Record | BadRecord]:
    """Yield rows; each part of the file is counted with its last row."""
    number = 0
    for batch, share in batches:
        for begin in range(0, batch.num_rows, _ROWS_AT_ONCE):
            values = values_of(batch.slice(begin, _ROWS_AT_ONCE), key)
            for i, value in enumerate(values, start=begin + 1):
                number += 1
                num_bytes = int(share * piece.num_bytes) if i == batch.num_rows else 0
                yield record_of_value(value, num_bytes, origin, number, key)


def record_of_value(
    value: Any, num_bytes: int, origin: Origin, number: int, key: str | None
) -> Record | BadRecord:
    """Return the document that a value of `values_of` is; arguments as of a record."""
    if value is None:
        message = f"{origin.where(number)}: expected a string under {key!r}, found null"
        return BadRecord(message, num_bytes)
    return Record(value, num_bytes, origin, number)


def values_of(rows: Any, key: str | None) -> Sequence[Any]:
    """Return texts as bytes, for what a table calls a string may be no UTF-8; or whole rows."""
    if key is None:
        return list(rows.to_pylist())
    pyarrow = pyarrow_module("a table")
    column = rows.column(rows.schema.get_field_index(key))
    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return list(column.cast(pyarrow.large_binary()).to_pylist())


def _row_groups(table: Any, piece: Piece, key: str | None) -> tuple[int, Iterator[Any]]:
    rows = [table.metadata.row_group(i).num_rows for i in range(piece.end)]
    wanted = range(piece.begin, piece.end)
    num_rows = max(1, sum(rows[piece.begin :]))
    found = table.iter_batches(
        batch_size=_ROWS_AT_ONCE,
        row_groups=list(wanted),
        columns=None if key is None else [key],
        use_threads=False,
    )
    return sum(rows[: piece.begin]), ((batch, batch.num_rows / num_rows) for batch in found)


def _record_batches(table: Any, piece: Piece) -> tuple[int, Iterator[Any]]:
    """What lies before the piece is read, too: only so the number of its rows is known."""
    if is_file(piece.path):
        batches = (table.get_batch(i) for i in range(piece.end))
    else:
        batches = (table.read_next_batch() for _ in range(piece.end))
    before = sum(next(batches).num_rows for _ in range(piece.begin))
    share = 1 / max(1, piece.end - piece.begin)
    return before, ((batch, share) for batch in batches)


def require_text_column(path: str, schema: Any, key: str) -> None:
    """Refuse a table without a column of texts under a key.

    Raises:
        ValueError: there is none, or it holds something else.
    """
    types = pyarrow_module(path).types
    if (at := schema.get_field_index(key)) < 0:
        raise ValueError(
            f"{path} has no column {key!r}, expected it to hold the text; there are "
            f"{', '.join(schema.names)}: name one (--json-key, or key of a source)"
        )
    kind = schema.field(at).type
    inner = kind.value_type if types.is_dictionary(kind) else kind
    tests = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    if not any(is_text(inner) for is_text in tests):
        raise ValueError(
            f"{path}: column {key!r} holds {kind}, expected strings: name the column of the text "
            "(--json-key, or key of a source)"
        )


@contextmanager
def opened(path: str, layout: str) -> Iterator[Any]:
    """Open a table; nothing is mapped, for a mapped file that shrinks kills who reads it."""
    if layout == "parquet":
        parquet = pyarrow_module(path, "pyarrow.parquet")
        with parquet.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False) as table:
            yield table
        return
    pyarrow = pyarrow_module(path)
    ipc = pyarrow_module(path, "pyarrow.ipc")
    options = ipc.IpcReadOptions(use_threads=False)
    with pyarrow.OSFile(path) as stream:
        opened = ipc.open_file if is_file(path) else ipc.open_stream
        with opened(stream, options=options) as table:
            yield table


def is_file(path: str) -> bool:
    """Whether Arrow batches have a table of contents; datasets that were saved are streams."""
    with open(path, "rb") as stream:
        return stream.read(len(_FILE_MAGIC)) == _FILE_MAGIC


@contextmanager
def named(path: str) -> Iterator[None]:
    """Say which file is damaged."""
    pyarrow = pyarrow_module(path)
    try:
        yield
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ValueError(
            f"{path} cannot be read as a table ({error}), expected a whole Parquet or Arrow file: "
            "copy it again"
        ) from error

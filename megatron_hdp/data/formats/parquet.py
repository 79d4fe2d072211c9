"""Parquet: parts are row groups."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_hdp.data.extras import import_extra
from megatron_hdp.data.formats.records import Piece
from megatron_hdp.data.formats.tables import (
    BUFFER_BYTES,
    ROWS_AT_ONCE,
    Part,
    Table,
    require_text_column,
)


class Parquet(Table):
    """A Parquet file."""

    name = "parquet"
    suffixes = (".parquet", ".pq")

    def sizes(self, path: str) -> list[float]:
        """Return the uncompressed bytes of the row groups."""
        with _opened(path) as file:
            return [float(group.total_byte_size) for group in _groups(file)]

    def rows(self, piece: Piece, key: str | None) -> tuple[int, Iterator[tuple[Any, float]]]:
        """Return the rows before a piece, and its batches; the file is open until they are read."""
        with _opened(piece.path, key) as file:
            rows = [group.num_rows for group in _groups(file)]
        return sum(rows[: piece.begin]), _batches(piece, key, sum(rows[piece.begin : piece.end]))

    def parts(self, path: str, key: str | None) -> Iterator[Part]:
        """Yield the row groups."""
        with _opened(path, key) as file:
            yield from (Part(i, group.num_rows) for i, group in enumerate(_groups(file)))

    def read_part(self, path: str, place: int, key: str | None) -> Any:
        """Return a row group."""
        columns = None if key is None else [key]
        with _opened(path) as file:
            return file.read_row_group(place, columns=columns, use_threads=False)


def _batches(piece: Piece, key: str | None, num_rows: int) -> Iterator[tuple[Any, float]]:
    with _opened(piece.path) as file:
        for batch in file.iter_batches(
            batch_size=ROWS_AT_ONCE,
            row_groups=list(range(piece.begin, piece.end)),
            columns=None if key is None else [key],
            use_threads=False,
        ):
            yield batch, batch.num_rows / max(1, num_rows)


def _groups(file: Any) -> Iterator[Any]:
    return map(file.metadata.row_group, range(file.metadata.num_row_groups))


@contextmanager
def _opened(path: str, key: str | None = None) -> Iterator[Any]:
    """Open a file, in which a column of texts is expected if a key is given.

    Nothing is mapped, for a mapped file that shrinks kills who reads it.
    """
    parquet = import_extra("pyarrow.parquet", path)
    with parquet.ParquetFile(path, buffer_size=BUFFER_BYTES, pre_buffer=False) as file:
        if key is not None:
            require_text_column(path, file.schema_arrow, key)
        yield file

"""Tables by pyarrow: in parts that can only be read whole, such as row groups or record batches."""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatron_hdp.data.extras import import_extra
from megatron_hdp.data.formats.records import (
    BadRecord,
    Format,
    Origin,
    Piece,
    Record,
    text_record,
)

ROWS_AT_ONCE = 128  # documents may be long
BUFFER_BYTES = 2**20


@dataclass(frozen=True)
class Part:
    """A row group or a record batch."""

    place: int
    """Its number; in an Arrow stream the byte where its message begins."""
    num_rows: int


class Table(Format):
    """A file of rows with columns."""

    @abstractmethod
    def sizes(self, path: str) -> list[float]:
        """Return the relative sizes of the parts."""

    @abstractmethod
    def rows(self, piece: Piece, key: str | None) -> tuple[int, Iterator[tuple[Any, float]]]:
        """Return the rows before a piece, and its batches of rows, each with its share of it.

        Raises:
            ValueError: there is no column of texts under the key.
        """

    @abstractmethod
    def parts(self, path: str, key: str | None) -> Iterator[Part]:
        """Yield the parts.

        Raises:
            ValueError: there is no such column, or the parts cannot be read one by one.
        """

    @abstractmethod
    def read_part(self, path: str, place: int, key: str | None) -> Any:
        """Return the part at a place as a pyarrow table, of a key only that column."""

    def pieces(self, path: str, size: int, piece_bytes: int) -> list[Piece]:
        """Put neighbouring parts together until they are large enough."""
        with named(path):
            sizes = self.sizes(path)
        scale = size / (sum(sizes) or 1)
        pieces, begin, taken = [], 0, 0.0
        for end, part in enumerate(sizes, start=1):
            taken += part * scale
            if taken >= piece_bytes or end == len(sizes):
                pieces.append(Piece(path, self.name, begin, end, int(taken)))
                begin, taken = end, 0.0
        return pieces

    def read(self, piece: Piece, key: str | None) -> Iterator[Record | BadRecord]:
        """Yield the rows of some parts."""
        with named(piece.path):
            before, batches = self.rows(piece, key)
            yield from _records(batches, Origin(piece.path, "row", lambda: before), key, piece)


class PartReader:
    """Reads rows of tables; the parts read last are kept, for each is read as a whole."""

    def __init__(self, key: str | None, kept_bytes: int) -> None:
        """Set what is read: the column of the text, or (None) whole rows."""
        self._key = key
        self._kept_bytes = kept_bytes
        self._kept: OrderedDict[tuple[str, int], Any] = OrderedDict()

    def rows(
        self, path: str, table: Table, place: int, first: int, numbers: Sequence[int]
    ) -> Iterator[Record | BadRecord]:
        """Yield rows of the part at a place, by their numbers in it; `first` rows lie before it.

        Raises:
            ValueError: the file is damaged.
        """
        origin = Origin(path, "row")
        with named(path):
            part = self._part(path, table, place)
            for number in numbers:
                (batch,) = part.slice(number, 1).to_batches()
                (value,) = values_of(batch, self._key)
                yield record_of_value(value, 0, origin, first + number + 1, self._key)

    def _part(self, path: str, table: Table, place: int) -> Any:
        name = (path, place)
        if name in self._kept:
            self._kept.move_to_end(name)
            return self._kept[name]
        part = self._kept[name] = table.read_part(path, place, self._key)
        # reading takes as much again, which Arrow would keep
        import_extra("pyarrow", path).default_memory_pool().release_unused()
        size = sum(one.nbytes for one in self._kept.values())
        while size > self._kept_bytes and len(self._kept) > 1:
            size -= self._kept.popitem(last=False)[1].nbytes
        return part


def _records(
    batches: Iterator[Any], origin: Origin, key: str | None, piece: Piece
) -> Iterator[Record | BadRecord]:
    """Yield rows; each part of the file is counted with its last row."""
    number = 0
    for batch, share in batches:
        for begin in range(0, batch.num_rows, ROWS_AT_ONCE):
            values = values_of(batch.slice(begin, ROWS_AT_ONCE), key)
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
    if key is not None:
        return text_record(value, num_bytes, origin, number)
    return Record(value, num_bytes, origin, number)


def values_of(rows: Any, key: str | None) -> Sequence[Any]:
    """Return texts as bytes, for what a table calls a string may be no UTF-8; or whole rows."""
    if key is None:
        return list(rows.to_pylist())
    pyarrow = import_extra("pyarrow", "a table")
    column = rows.column(rows.schema.get_field_index(key))
    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return list(column.cast(pyarrow.large_binary()).to_pylist())


def require_text_column(path: str, schema: Any, key: str) -> None:
    """Refuse a table without a column of texts under a key.

    Raises:
        ValueError: there is none, or it holds something else.
    """
    types = import_extra("pyarrow", path).types
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
def named(path: str) -> Iterator[None]:
    """Say which file is damaged."""
    pyarrow = import_extra("pyarrow", path)
    try:
        yield
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ValueError(
            f"{path} cannot be read as a table ({error}), expected a whole Parquet or Arrow file: "
            "copy it again"
        ) from error

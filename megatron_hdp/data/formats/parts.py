"""Random access to tables: the parts that can only be read whole, and the rows of one."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_hdp.data.formats.extra import pyarrow_module
from megatron_hdp.data.formats.records import BadRecord, Origin, Record
from megatron_hdp.data.formats.tables import (
    is_file,
    named,
    opened,
    record_of_value,
    require_text_column,
    values_of,
)


@dataclass(frozen=True)
class Part:
    """A row group or a record batch."""

    place: int
    """Its number; in an Arrow stream the byte where its message begins."""
    num_rows: int


def table_parts(path: str, layout: str, key: str | None) -> Iterator[Part]:
    """Yield the parts of a table; of Arrow files all of it is read for that.

    Args:
        path: the file.
        layout: ``parquet`` or ``arrow``.
        key: the column of the text; None: rows are wanted.

    Raises:
        ValueError: it is damaged, has no such column, or is a stream with dictionaries.
    """
    with named(path):
        if layout == "arrow" and not is_file(path):
            yield from _messages(path, key)
            return
        with opened(path, layout) as table:
            schema = table.schema_arrow if layout == "parquet" else table.schema
            if key is not None:
                require_text_column(path, schema, key)
            if layout == "parquet":
                groups = map(table.metadata.row_group, range(table.metadata.num_row_groups))
                yield from (Part(i, group.num_rows) for i, group in enumerate(groups))
            else:
                batches = map(table.get_batch, range(table.num_record_batches))
                yield from (Part(i, batch.num_rows) for i, batch in enumerate(batches))


def _messages(path: str, key: str | None) -> Iterator[Part]:
    pyarrow, ipc = pyarrow_module(path), pyarrow_module(path, "pyarrow.ipc")
    with pyarrow.OSFile(path) as stream:
        schema = ipc.read_schema(stream)
        if key is not None:
            require_text_column(path, schema, key)
        while True:
            place = stream.tell()
            try:
                message = ipc.read_message(stream)
            except EOFError:
                return
            if message.type != "record batch":
                raise ValueError(
                    f"{path} is an Arrow stream with a {message.type}, expected batches that can "
                    "be read one by one: prepare the source (tokenise: ahead), or save it as "
                    "Parquet"
                )
            yield Part(place, ipc.read_record_batch(message, schema).num_rows)


class PartReader:
    """Reads rows of tables; the parts read last are kept, for each is read as a whole."""

    def __init__(self, key: str | None, kept_bytes: int) -> None:
        """Set what is read.

        Args:
            key: the column of the text; None: whole rows.
            kept_bytes: of the parts that are kept; the last one is, however large.
        """
        self._key = key
        self._kept_bytes = kept_bytes
        self._kept: OrderedDict[tuple[str, int], Any] = OrderedDict()

    def rows(
        self, path: str, layout: str, place: int, first: int, numbers: Sequence[int]
    ) -> Iterator[Record | BadRecord]:
        """Yield rows of a part.

        Args:
            path: the file.
            layout: ``parquet`` or ``arrow``.
            place: of the part.
            first: rows of the file before the part.
            numbers: of the rows, from 0 on, in the part.

        Raises:
            ValueError: the file is damaged.
        """
        origin = Origin(path, "row")
        with named(path):
            part = self._part(path, layout, place)
            for number in numbers:
                (batch,) = part.slice(number, 1).to_batches()
                (value,) = values_of(batch, self._key)
                yield record_of_value(value, 0, origin, first + number + 1, self._key)

    def _part(self, path: str, layout: str, place: int) -> Any:
        name = (path, place)
        if name in self._kept:
            self._kept.move_to_end(name)
            return self._kept[name]
        part = self._kept[name] = _read(path, layout, place, self._key)
        size = sum(one.nbytes for one in self._kept.values())
        while size > self._kept_bytes and len(self._kept) > 1:
            size -= self._kept.popitem(last=False)[1].nbytes
        return part


def _read(path: str, layout: str, place: int, key: str | None) -> Any:
    """Return a part as a pyarrow table."""
    pyarrow = pyarrow_module(path)
    columns = None if key is None else [key]
    if layout == "arrow" and not is_file(path):
        ipc = pyarrow_module(path, "pyarrow.ipc")
        with pyarrow.OSFile(path) as stream:
            schema = ipc.read_schema(stream)
            stream.seek(place)
            found = ipc.read_record_batch(ipc.read_message(stream), schema)
    else:
        with opened(path, layout) as table:
            if layout == "parquet":
                return table.read_row_group(place, columns=columns, use_threads=False)
            found = table.get_batch(place)
    whole = pyarrow.Table.from_batches([found])
    return whole if columns is None else whole.select(columns)

"""Arrow: parts are record batches, of files with a table of contents or of streams without."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_hdp.data.extras import import_extra
from megatron_hdp.data.formats.records import Piece
from megatron_hdp.data.formats.tables import Part, Table, require_text_column

_FILE_MAGIC = b"ARROW1"


class Arrow(Table):
    """An Arrow file or stream; Hugging Face saves datasets as streams."""

    name = "arrow"
    suffixes = (".arrow", ".feather")

    def sizes(self, path: str) -> list[float]:
        """Return the bytes of the batches; those of a file are taken as equal."""
        with _opened(path) as table:
            if _is_file(path):
                return [1.0] * table.num_record_batches
            return [float(batch.nbytes) for batch in table]

    def rows(self, piece: Piece, key: str | None) -> tuple[int, Iterator[tuple[Any, float]]]:
        """Return the rows before a piece, which are read for that, and the batches of the piece."""
        with _opened(piece.path, key) as table:
            before = sum(batch.num_rows for batch in _batches(table, piece.path, piece.begin))
        return before, _shares(piece)

    def parts(self, path: str, key: str | None) -> Iterator[Part]:
        """Yield the batches; the whole file is read for that."""
        if not _is_file(path):
            yield from _messages(path, key)
            return
        with _opened(path, key) as table:
            batches = map(table.get_batch, range(table.num_record_batches))
            yield from (Part(i, batch.num_rows) for i, batch in enumerate(batches))

    def read_part(self, path: str, place: int, key: str | None) -> Any:
        """Return a batch; in a stream, the one whose message begins at a byte."""
        pyarrow = import_extra("pyarrow", path)
        if _is_file(path):
            with _opened(path) as table:
                found = table.get_batch(place)
        else:
            ipc = import_extra("pyarrow.ipc", path)
            with pyarrow.OSFile(path) as stream:
                schema = ipc.read_schema(stream)
                stream.seek(place)
                found = ipc.read_record_batch(ipc.read_message(stream), schema)
        whole = pyarrow.Table.from_batches([found])
        return whole if key is None else whole.select([key])


def _messages(path: str, key: str | None) -> Iterator[Part]:
    pyarrow, ipc = import_extra("pyarrow", path), import_extra("pyarrow.ipc", path)
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


def _batches(table: Any, path: str, count: int) -> Iterator[Any]:
    """Return the first batches of a table."""
    if _is_file(path):
        return (table.get_batch(i) for i in range(count))
    return (table.read_next_batch() for _ in range(count))


def _shares(piece: Piece) -> Iterator[tuple[Any, float]]:
    with _opened(piece.path) as table:
        for number, batch in enumerate(_batches(table, piece.path, piece.end)):
            if number >= piece.begin:
                yield batch, 1 / (piece.end - piece.begin)


@contextmanager
def _opened(path: str, key: str | None = None) -> Iterator[Any]:
    """Open a table, in which a column of texts is expected if a key is given.

    Nothing is mapped, for a mapped file that shrinks kills who reads it.
    """
    pyarrow = import_extra("pyarrow", path)
    ipc = import_extra("pyarrow.ipc", path)
    options = ipc.IpcReadOptions(use_threads=False)
    with pyarrow.OSFile(path) as stream:
        opened = ipc.open_file if _is_file(path) else ipc.open_stream
        with opened(stream, options=options) as table:
            if key is not None:
                require_text_column(path, table.schema, key)
            yield table


def _is_file(path: str) -> bool:
    """Whether Arrow batches have a table of contents; datasets that were saved are streams."""
    with open(path, "rb") as stream:
        return stream.read(len(_FILE_MAGIC)) == _FILE_MAGIC

"""The ``.spans`` beside a ``.bin/.idx`` pair: which tokens of each document carry loss.

Layout (little endian): 8 bytes magic, ``uint64`` version, ``uint64`` number of documents ``D``,
``uint64`` number of spans ``m``, then three columns of ``int64``: ``first_span[D + 1]``, the spans
of document ``d`` being ``first_span[d]`` to ``first_span[d + 1]``; ``spans[m, 2]``, first position
and the one behind the last; ``trained_before[m + 1]``, trained tokens in all spans before one. With
the last column a count costs two searches among the spans of its document, however long they are.
"""

import os
import shutil
import struct
from collections.abc import Iterable
from contextlib import ExitStack
from tempfile import TemporaryFile
from typing import BinaryIO, Self

import numpy as np

from megatron_hdp.arrays import BoolArray, Int64Array
from megatron_hdp.data.index_file import TokenFileError, TokenFileNotFoundError
from megatron_hdp.files import new_file

_MAGIC = b"HDPSPANS"
_VERSION = 1
_HEADER = struct.Struct("<8sQQQ")
_INT64 = np.dtype("<i8")
_PIECE = 1 << 18  # rows that are looked at or copied at a time: a few MB
_MOST_TOKENS = 2**62  # of a document: sums with one more span stay in 64 bits
_REBUILD = "make it again from its source"


class Spans:
    """The trained tokens of the documents of one ``.spans`` file.

    A token is *trained* if it is predicted with loss. Spans ``[start, stop)`` count positions in
    the document, rise, and neither touch the first token, which nothing predicts, nor each other's
    tokens.

    The file is memory-mapped, so processes of a node share what they touch and nothing private
    grows with it. It is put in place whole and never changed (:class:`SpansWriter`); whoever cuts a
    mapped file short makes the kernel kill its readers.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open ``PREFIX.spans`` and read all of it once, to find damage.

        Raises:
            TokenFileNotFoundError: there is no such file.
            TokenFileError: it is no file of spans, is truncated, or contradicts itself.
        """
        self.path = os.fspath(path)
        num_documents, num_spans = _read_header(self.path)
        self._first = _column(self.path, _HEADER.size, num_documents + 1)
        place = _HEADER.size + self._first.nbytes
        self._spans = _column(self.path, place, 2 * num_spans).reshape(num_spans, 2)
        self._before = _column(self.path, place + self._spans.nbytes, num_spans + 1)
        self._check()

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self._first) - 1

    @property
    def num_trained_tokens(self) -> int:
        """Trained tokens of all documents."""
        return int(self._before[-1])

    def of(self, document: int) -> Int64Array:
        """Return the spans of a document, ``int64[m, 2]``."""
        self._require_documents(np.asarray([document]))
        first, stop = self._first[document : document + 2]
        return np.array(self._spans[first:stop], dtype=np.int64)

    def counts(self, documents: Int64Array, starts: Int64Array, stops: Int64Array) -> Int64Array:
        """Return how many tokens at positions ``start <= p < stop`` are trained, ``int64[n]``."""
        documents = np.asarray(documents, dtype=np.int64)
        self._require_documents(documents)
        starts, stops = (np.asarray(one, dtype=np.int64) for one in (starts, stops))
        wrong = (starts < 0) | (stops < starts)
        if wrong.any():
            row = int(np.argmax(wrong))
            raise ValueError(
                f"tokens [{starts[row]}, {stops[row]}) of document {documents[row]}: expected "
                "0 <= start <= stop"
            )
        return self._trained_up_to(documents, stops) - self._trained_up_to(documents, starts)

    def mask(self, document: int, start: int, stop: int) -> BoolArray:
        """Return ``bool[stop - start]``: whether the token at ``start + i`` is trained."""
        if not 0 <= start <= stop:
            raise ValueError(
                f"tokens [{start}, {stop}) of document {document}: expected 0 <= start <= stop"
            )
        steps = np.zeros(stop - start + 1, dtype=np.int8)
        inside = np.clip(self.of(document) - start, 0, stop - start)
        np.add.at(steps, inside[:, 0], 1)
        np.add.at(steps, inside[:, 1], -1)
        return np.cumsum(steps[:-1], dtype=np.int8).astype(np.bool_)

    def _trained_up_to(self, documents: Int64Array, positions: Int64Array) -> Int64Array:
        """Return the trained tokens before ``positions`` of ``documents``, and of all before."""
        first = np.asarray(self._first[documents], dtype=np.int64)
        low, high = first.copy(), np.asarray(self._first[documents + 1], dtype=np.int64)
        while np.any(searched := low < high):  # all rows halve their own range at once
            middle = (low + high) // 2
            begins = np.zeros_like(searched)
            begins[searched] = self._spans[middle[searched], 0] < positions[searched]
            low = np.where(begins, middle + 1, low)
            high = np.where(searched & ~begins, middle, high)
        counted = np.asarray(self._before[low], dtype=np.int64)
        some = low > first  # the last span that begins before the position may end behind it
        beyond = self._spans[low[some] - 1, 1] - positions[some]
        counted[some] -= np.maximum(beyond, 0)
        return counted

    def _require_documents(self, documents: Int64Array) -> None:
        if len(documents) and not 0 <= documents.min() <= documents.max() < len(self):
            worst = documents[np.argmax((documents < 0) | (documents >= len(self)))]
            raise ValueError(f"document {worst} of {self.path}: it has {len(self):,} documents")

    def _check(self) -> None:
        """Walk through all columns in pieces and refuse what does not rise as it must."""
        num_spans = len(self._spans)
        if self._first[0] != 0 or self._first[-1] != num_spans or not _rises(self._first):
            raise _damaged(self.path, f"document borders do not rise from 0 to {num_spans:,}")
        if self._before[0] != 0:
            raise _damaged(self.path, f"{self._before[0]} trained tokens lie before the first span")
        for begin in range(0, num_spans, _PIECE):
            spans = np.asarray(self._spans[begin : begin + _PIECE + 1])
            start, stop = spans[:_PIECE, 0], spans[:_PIECE, 1]
            if np.any(start < 1) or np.any(stop <= start) or np.any(stop > _MOST_TOKENS):
                raise _damaged(self.path, "a span is empty, too long or begins before token 1")
            before = self._before[begin : begin + _PIECE + 1]
            if np.any(before < 0) or not np.array_equal(np.diff(before), stop - start):
                raise _damaged(self.path, "counts are not those of the spans")
            back = np.flatnonzero(spans[1:, 0] < spans[:-1, 1]) + begin + 1
            if not _all_in(back, self._first):
                raise _damaged(self.path, "spans of a document overlap or do not rise")


class SpansWriter:
    """A context manager that writes a ``.spans``, document by document: all of it or nothing.

    What is added goes to files without a name, so memory does not grow; when the block ends without
    an error they are joined, else nothing is left behind.
    """

    def __init__(self, path: str | os.PathLike[str], *, durable: bool = False) -> None:
        """Prepare ``PREFIX.spans``; missing folders are made.

        A durable file is on the disk, whatever happens, once it has its name.
        """
        self._path = os.fspath(path)
        self._durable = durable
        self.num_documents = 0
        self.num_spans = 0
        self.num_trained_tokens = 0
        self._columns: tuple[BinaryIO, ...] = ()
        self._open = ExitStack()

    def __enter__(self) -> Self:
        """Open the temporary files."""
        folder = os.path.dirname(self._path) or "."
        os.makedirs(folder, exist_ok=True)
        self._columns = tuple(
            self._open.enter_context(TemporaryFile(dir=folder))  # noqa: SIM115, the stack closes it
            for _ in range(3)
        )
        for column in self._columns[::2]:  # both begin with a 0
            column.write(np.zeros(1, dtype=_INT64).tobytes())
        return self

    def add(self, spans: Int64Array) -> None:
        """Append the next document.

        Args:
            spans: ``int64[m, 2]`` of ``[start, stop)``; position 0 is left out of them, because
                nothing predicts it.

        Raises:
            ValueError: a span is empty, negative, or overlaps the one before it.
        """
        spans = np.asarray(spans, dtype=np.int64).reshape(-1, 2)
        flat = spans.ravel()
        if np.any(spans[:, 0] >= spans[:, 1]) or np.any(np.diff(flat) < 0) or np.any(flat < 0):
            raise ValueError(
                f"document {self.num_documents} has the spans {spans.tolist()[:8]}: expected "
                "[start, stop) with 0 <= start < stop, in order and without overlap"
            )
        if len(spans) and spans[0, 0] == 0:
            spans = np.maximum(spans, 1)
            spans = spans[spans[:, 0] < spans[:, 1]]
        before = np.cumsum(spans[:, 1] - spans[:, 0]) + self.num_trained_tokens
        self.num_documents += 1
        self.num_spans += len(spans)
        self.num_trained_tokens = int(before[-1]) if len(spans) else self.num_trained_tokens
        values = (np.array([self.num_spans]), spans, before)
        for column, value in zip(self._columns, values, strict=True):
            column.write(value.astype(_INT64, copy=False).tobytes())

    def add_all_of(self, other: Spans) -> None:
        """Append every document of a file, in pieces."""
        columns = (other._first[1:], other._spans, other._before[1:])
        offsets = (self.num_spans, 0, self.num_trained_tokens)
        for column, values, offset in zip(self._columns, columns, offsets, strict=True):
            for begin in range(0, len(values), _PIECE):
                column.write((values[begin : begin + _PIECE] + offset).astype(_INT64).tobytes())
        self.num_documents += len(other)
        self.num_spans += len(other._spans)
        self.num_trained_tokens += other.num_trained_tokens

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        """Put the file in place, or remove what was written if the block failed."""
        with self._open:
            if error_type is None:
                self._commit()

    def _commit(self) -> None:
        with (
            new_file(self._path, durable=self._durable) as temporary,
            open(temporary, "wb") as target,
        ):
            target.write(_HEADER.pack(_MAGIC, _VERSION, self.num_documents, self.num_spans))
            for column in self._columns:
                column.seek(0)
                shutil.copyfileobj(column, target, 1 << 20)


def concatenate_spans(
    paths: Iterable[str | os.PathLike[str]],
    target: str | os.PathLike[str],
    *,
    durable: bool = False,
) -> None:
    """Write the documents of several files into one, in this order.

    Raises:
        TokenFileError: one of the files is damaged or missing; there is no target then.
    """
    with SpansWriter(target, durable=durable) as writer:
        for path in paths:
            writer.add_all_of(Spans(path))


def _read_header(path: str) -> tuple[int, int]:
    """Return the numbers of documents and spans, which the file's size agrees with."""
    if not os.path.isfile(path):
        raise TokenFileNotFoundError(
            f"no file of spans {path}: expected it beside its .bin and .idx; {_REBUILD}"
        )
    size = os.path.getsize(path)
    with open(path, "rb") as stream:
        header = stream.read(_HEADER.size)
    if not header.startswith(_MAGIC):
        raise TokenFileError(
            f"{path} begins with {header[: len(_MAGIC)]!r}, a file of spans with {_MAGIC!r}: "
            f"the file is something else; {_REBUILD}"
        )
    if len(header) < _HEADER.size:
        raise TokenFileError(
            f"{path} has {size} bytes, its header alone takes {_HEADER.size}: the file is "
            f"truncated; {_REBUILD}"
        )
    _, version, num_documents, num_spans = _HEADER.unpack(header)
    if version != _VERSION:
        raise TokenFileError(f"{path} has version {version}, expected {_VERSION}: {_REBUILD}")
    expected = _HEADER.size + _INT64.itemsize * (num_documents + 1 + 3 * num_spans + 1)
    if size != expected:
        raise TokenFileError(
            f"{path} has {size:,} bytes, its header promises {expected:,} ({num_documents:,} "
            f"documents, {num_spans:,} spans): the file is truncated or damaged; {_REBUILD}"
        )
    return num_documents, num_spans


def _column(path: str, place: int, count: int) -> Int64Array:
    """Return a mapped column; an empty one cannot be mapped."""
    if count == 0:
        return np.zeros(0, dtype=np.int64)
    return np.memmap(path, dtype=_INT64, mode="r", offset=place, shape=(count,))


def _rises(values: Int64Array) -> bool:
    """Whether no value is less than the one before it, looked at in pieces."""
    pieces = (values[begin : begin + _PIECE + 1] for begin in range(0, len(values), _PIECE))
    return all(bool(np.all(piece[1:] >= piece[:-1])) for piece in pieces)


def _all_in(wanted: Int64Array, borders: Int64Array) -> bool:
    """Whether all wanted values are among the borders, which rise."""
    places = np.searchsorted(borders, wanted)
    return bool(np.array_equal(borders[np.minimum(places, len(borders) - 1)], wanted))


def _damaged(path: str, what: str) -> TokenFileError:
    return TokenFileError(f"{path}: {what}: the file is damaged; {_REBUILD}")

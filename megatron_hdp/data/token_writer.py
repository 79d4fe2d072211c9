"""Writes ``.bin/.idx`` pairs as Megatron's builder does: all of a pair or nothing of it.

One document is one sequence. The layout is that of `megatron_hdp.data.index_file`.
"""

import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from errno import EINVAL, ENOSYS, EOPNOTSUPP, EPERM, EXDEV
from itertools import chain
from typing import BinaryIO, Self

import numpy as np
import numpy.typing as npt

from megatron_hdp.arrays import Int32Array, Int64Array
from megatron_hdp.data.index_file import HEADER_BYTES, IndexFile, TokenFileError, pack_header
from megatron_hdp.files import sync

_MAX_DOCUMENT_TOKENS = 2**31 - 1
_UINT16_BELOW = 65_500
_DOCUMENTS_AT_ONCE = 2**18
_BUFFER_BYTES = 2**20
_COPY_BYTES = 2**24
_NOT_IN_KERNEL = {EINVAL, ENOSYS, EOPNOTSUPP, EPERM, EXDEV}  # for these files, or not at all


def token_dtype(vocab_size: int) -> np.dtype[np.integer]:
    """Return the integer type of tokens on disk, as Megatron chooses it."""
    return np.dtype(np.uint16 if vocab_size < _UINT16_BELOW else np.int32)


class TokenWriter:
    """A context manager that writes documents to a pair.

    Files are built under temporary names in the target folder and renamed when the block ends
    without an error; otherwise nothing is left behind and an older pair stays as it was. In memory
    it keeps four bytes a document.
    """

    def __init__(
        self, prefix: str | os.PathLike[str], vocab_size: int, *, durable: bool = False
    ) -> None:
        """Prepare ``PREFIX.bin`` and ``PREFIX.idx``; missing folders are made.

        Args:
            prefix: path without suffix.
            vocab_size: chooses the integer type on disk, as Megatron does.
            durable: whether the pair is on the disk, whatever happens, once it has its name.
        """
        self._pair = _NewPair(prefix, durable)
        self._vocab_size = vocab_size
        self._dtype = token_dtype(vocab_size)
        self._lengths = array("i")
        self.num_tokens = 0
        self._file: BinaryIO

    @property
    def num_documents(self) -> int:
        """Documents added so far."""
        return len(self._lengths)

    def __enter__(self) -> Self:
        """Open the temporary token file."""
        self._pair.__enter__()
        self._file = open(self._pair.bin, "wb", buffering=_BUFFER_BYTES)
        return self

    def add(self, tokens: npt.NDArray[np.integer]) -> None:
        """Append one document; it must have a token.

        Raises:
            ValueError: no token, more than an ``.idx`` can count, or an id outside the vocabulary.
        """
        self.add_batch(tokens, np.array([len(tokens)]))

    def add_batch(self, ids: npt.NDArray[np.integer], lengths: Int64Array) -> None:
        """Append documents that stand one after the other, of 1 or more tokens each.

        Raises:
            ValueError: as `add`.
        """
        if len(lengths) == 0:
            return
        self._check(ids, lengths)
        self._file.write(ids.astype(self._dtype, copy=False).data)
        self._lengths.frombytes(lengths.astype(np.int32).tobytes())
        self.num_tokens += len(ids)

    def _check(self, ids: npt.NDArray[np.integer], lengths: Int64Array) -> None:
        if lengths.min() < 1 or lengths.max() > _MAX_DOCUMENT_TOKENS:
            wrong = int(np.argmax((lengths < 1) | (lengths > _MAX_DOCUMENT_TOKENS)))
            raise ValueError(
                f"document {self.num_documents + wrong} has {lengths[wrong]:,} tokens, an .idx "
                f"holds 1 to {_MAX_DOCUMENT_TOKENS:,}: leave empty documents out and cut longer "
                "ones"
            )
        if ids.min() < 0 or ids.max() >= self._vocab_size:
            outside = int(np.argmax((ids < 0) | (ids >= self._vocab_size)))
            wrong = int(np.searchsorted(np.cumsum(lengths), outside, side="right"))
            raise ValueError(
                f"document {self.num_documents + wrong} has the token id {ids[outside]}, expected "
                f"0 to {self._vocab_size - 1}: check the tokenizer's vocab_size"
            )

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        """Put the pair in place, or remove what was written if the block failed."""
        if error_type is not None:
            with suppress(OSError):  # on a full disk, which has been said
                self._file.close()
            self._pair.discard()
            return
        with self._pair:
            self._file.close()
            lengths = np.frombuffer(self._lengths, dtype=np.int32)
            _write_index(self._pair.idx, self._dtype, [[lengths]])


def concatenate_pairs(
    prefixes: Sequence[str | os.PathLike[str]],
    target: str | os.PathLike[str],
    *,
    durable: bool = False,
) -> None:
    """Write the documents of pairs that `TokenWriter` wrote, in their order, as one pair.

    Raises:
        TokenFileError: a pair is damaged or of another kind.
        OSError: the disk is full, or the folder cannot be written.
    """
    shards = [_Shard(os.fspath(prefix)) for prefix in prefixes]
    dtype = shards[0].dtype
    for shard in shards:
        if shard.dtype != dtype:
            raise TokenFileError(
                f"{shard.prefix} has tokens of {shard.dtype}, expected {dtype} as "
                f"{shards[0].prefix}: make both with one tokenizer"
            )
    with _NewPair(target, durable) as pair:
        _concatenate([shard.prefix + ".bin" for shard in shards], pair.bin)
        _write_index(pair.idx, dtype, shards)


def move_pair(prefix: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Give a whole pair another name on its disk, in place of what has that name."""
    source, to = os.fspath(prefix), os.fspath(target)
    # Without its .idx a half-replaced pair is refused at open instead of being read wrongly.
    if os.path.exists(to + ".idx"):
        os.remove(to + ".idx")
    os.replace(source + ".bin", to + ".bin")
    os.replace(source + ".idx", to + ".idx")


def _concatenate(paths: Iterable[str], target: str) -> None:
    """Write the contents of files, in their order, to a new one; in the kernel where that can."""
    with open(target, "wb", buffering=0) as to:
        for path in paths:
            with open(path, "rb", buffering=0) as source:
                try:
                    while _copy(source.fileno(), to.fileno()):
                        pass
                except OSError as error:
                    raise OSError(error.errno, error.strerror, target) from error


def _copy(source: int, target: int) -> int:
    """Copy some bytes from where both files stand; return how many, 0 at the end."""
    if hasattr(os, "copy_file_range"):
        try:
            return os.copy_file_range(source, target, _COPY_BYTES)
        except OSError as error:
            if error.errno not in _NOT_IN_KERNEL:
                raise
    block = os.read(source, _COPY_BYTES)
    left = memoryview(block)
    while left:
        left = left[os.write(target, left) :]
    return len(block)


class _Shard:
    """Lengths of the documents of a pair, read in parts as often as they are wanted."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        index = IndexFile(prefix + ".idx")
        self.dtype, self._num_documents = index.dtype, index.num_sequences
        num_tokens = sum(int(part.sum(dtype=np.int64)) for part in self)
        found, expected = os.path.getsize(prefix + ".bin"), num_tokens * self.dtype.itemsize
        if index.num_documents != self._num_documents or found != expected:
            raise TokenFileError(
                f"{prefix}.bin has {found:,} bytes and its .idx {index.num_documents:,} documents "
                f"of {self._num_documents:,} sequences, expected {expected:,} bytes and a document "
                "a sequence: it is damaged or of another kind; make it again"
            )

    def __iter__(self) -> Iterator[Int32Array]:
        with open(self.prefix + ".idx", "rb", buffering=0) as stream:
            stream.seek(HEADER_BYTES)
            for begin in range(0, self._num_documents, _DOCUMENTS_AT_ONCE):
                count = min(_DOCUMENTS_AT_ONCE, self._num_documents - begin)
                yield np.fromfile(stream, dtype=np.int32, count=count)


def _write_index(
    path: str, dtype: np.dtype[np.generic], lengths: Sequence[Iterable[Int32Array]]
) -> None:
    """Write an ``.idx``; lengths are gone through three times, so that few are held at a time."""
    num_documents = sum(len(part) for parts in lengths for part in parts)
    with open(path, "wb", buffering=_BUFFER_BYTES) as stream:
        stream.write(pack_header(dtype, num_documents, num_documents + 1))
        for part in chain.from_iterable(lengths):
            stream.write(part.data)
        place = 0
        for part in chain.from_iterable(lengths):
            ends = place + np.cumsum(part, dtype=np.int64) * dtype.itemsize
            stream.write((ends - part.astype(np.int64) * dtype.itemsize).data)
            place = int(ends[-1]) if len(ends) else place
        for begin in range(0, num_documents + 1, _DOCUMENTS_AT_ONCE):
            end = min(begin + _DOCUMENTS_AT_ONCE, num_documents + 1)
            stream.write(np.arange(begin, end, dtype=np.int64).data)


class _NewPair:
    """The temporary files of a pair, which get their names when the block ends without an error."""

    def __init__(self, prefix: str | os.PathLike[str], durable: bool) -> None:
        self._prefix = os.fspath(prefix)
        self._folder = os.path.dirname(self._prefix) or "."
        self._temporary = f"{self._prefix}.tmp{os.getpid()}"
        self.bin, self.idx = self._temporary + ".bin", self._temporary + ".idx"
        self._durable = durable

    def __enter__(self) -> Self:
        os.makedirs(self._folder, exist_ok=True)
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        try:
            if error_type is None:
                for path in (self.bin, self.idx) if self._durable else ():
                    sync(path)
                move_pair(self._temporary, self._prefix)
                if self._durable:
                    sync(self._folder)
        finally:
            self.discard()

    def discard(self) -> None:
        for path in (self.bin, self.idx):
            with suppress(FileNotFoundError):
                os.remove(path)

"""The ``.idx`` half of a Megatron dataset: where each document lies and how long it is.

Layout (little endian): 9 bytes magic, ``uint64`` version, ``uint8`` dtype code, ``uint64`` number
of sequences ``n``, ``uint64`` number of document borders ``d``, ``int32[n]`` sequence lengths in
tokens, ``int64[n]`` byte pointers, ``int64[d]`` document borders (sequence indices, the first is
0). It is read piece by piece, so that an index of a billion documents takes no memory.
"""

import os
import struct
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from megatron_hdp.arrays import ByteArray, Int32Array, Int64Array

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
HEADER_BYTES = _HEADER.size
_REBUILD = "build the pair again with `megatron-hdp preprocess`"
_PIECE = 1 << 18  # sequences and documents read at once: their arrays stay in a core's cache
_DTYPE_OF_CODE: dict[int, npt.DTypeLike] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}


class TokenFileError(ValueError):
    """A ``.bin/.idx`` pair that cannot be used; the message says what was found and expected."""


class TokenFileNotFoundError(TokenFileError, FileNotFoundError):
    """One of the two files of a pair does not exist."""


def pack_header(dtype: np.dtype[np.generic], num_sequences: int, num_borders: int) -> bytes:
    """Return the header of an ``.idx``."""
    code = next(code for code, known in _DTYPE_OF_CODE.items() if np.dtype(known) == dtype)
    return _HEADER.pack(_MAGIC, _VERSION, code, num_sequences, num_borders)


def read_into(file: int, target: ByteArray, place: int) -> bool:
    """Fill an array with a file's bytes from a place on; False: the file ends before.

    It is read and not mapped, for a mapped file that shrinks kills whoever touches what is gone.
    """
    while len(target):
        num_read = os.preadv(file, [target.data], place)
        if num_read == 0:
            return False
        target, place = target[num_read:], place + num_read
    return True


@dataclass(frozen=True)
class IndexPiece:
    """Neighbouring sequences of an ``.idx``, and the documents that end among them."""

    first_sequence: int
    lengths: Int64Array
    """Tokens of each sequence."""
    pointers: Int64Array
    """Byte in the ``.bin`` where each sequence begins."""
    first_document: int
    """The first document that is not over before the piece."""
    ends: Int64Array
    """Of each document that ends in the piece, from the first one on: the sequence after it."""

    @property
    def last_sequence(self) -> int:
        """The sequence after the piece."""
        return self.first_sequence + len(self.lengths)

    @cached_property
    def is_plain(self) -> bool:
        """Whether one document ends with every sequence."""
        first, stop = self.first_sequence, self.last_sequence
        return np.array_equal(self.ends, np.arange(first + 1, stop + 1))


@dataclass(frozen=True)
class Documents:
    """Neighbouring documents of a token file."""

    first: int
    """Number of the first one."""
    lengths: Int64Array
    """Tokens of each."""
    begins: Int64Array
    """Place of each one's first token in the ``.bin``, counted in tokens; any where it has none."""


class IndexFile:
    """An open ``.idx`` whose header and size have been checked."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open the file.

        Raises:
            TokenFileNotFoundError: there is no such file.
            TokenFileError: it is no index of version 1, or is truncated.
        """
        self.path = os.fspath(path)
        if not os.path.isfile(self.path):
            raise TokenFileNotFoundError(
                f"no index file {self.path}: expected a Megatron .idx; give the prefix without its "
                "suffix, or make the pair with `megatron-hdp preprocess`"
            )
        self._file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)
        self.dtype, self.num_sequences, num_borders = self._read_header()
        self._pointers_at = _HEADER.size + 4 * self.num_sequences
        self._borders_at = _HEADER.size + 12 * self.num_sequences
        self._check_outer_borders(num_borders)
        self.num_documents = num_borders - 1

    def pieces(self) -> Iterator[IndexPiece]:
        """Read the file from its beginning, piece by piece; a later call reads it again.

        Raises:
            TokenFileError: document borders do not rise, or the file has become shorter.
        """
        sequence = document = border = 0
        while sequence < self.num_sequences or document < self.num_documents:
            stop = min(sequence + _PIECE, self.num_sequences)
            count = min(_PIECE, self.num_documents - document)
            ends = self._read("<i8", self._borders_at + 8 * (document + 1), count)
            if (
                count == 0
                or ends[0] < border
                or ends[-1] > self.num_sequences
                or np.any(ends[1:] < ends[:-1])
            ):
                self._refuse_borders()
            num_ended = int(np.searchsorted(ends, stop, side="right"))
            if num_ended == len(ends):  # the next borders may lie before the stop
                stop = int(ends[-1])
            ends = ends[:num_ended]
            count = stop - sequence
            yield IndexPiece(
                first_sequence=sequence,
                lengths=self._read("<i4", _HEADER.size + 4 * sequence, count),
                pointers=self._read("<i8", self._pointers_at + 8 * sequence, count),
                first_document=document,
                ends=ends,
            )
            sequence, document = stop, document + num_ended
            border = int(ends[-1]) if num_ended else border

    def documents(self, pieces: Iterator[IndexPiece] | None = None) -> Iterator[Documents]:
        """The documents of all pieces, piece by piece; one of several sequences is their sum.

        Args:
            pieces: as `pieces` gives them, such as checked ones; None: read now.
        """
        sums = _DocumentSums(self.dtype.itemsize)
        return map(sums.add, self.pieces() if pieces is None else pieces)

    def sequences(self) -> tuple[Int32Array, Int64Array]:
        """Lengths and byte pointers of all sequences: 12 bytes of memory each."""
        lengths = np.empty(self.num_sequences, dtype=np.int32)
        pointers = np.empty(self.num_sequences, dtype=np.int64)
        self._read_into(lengths.view(np.uint8), _HEADER.size)
        self._read_into(pointers.view(np.uint8), self._pointers_at)
        return lengths, pointers

    def _read_header(self) -> tuple[np.dtype[np.generic], int, int]:
        """Return token dtype, number of sequences and number of document borders."""
        path, size = self.path, os.fstat(self._file).st_size
        header = os.pread(self._file, _HEADER.size, 0)
        if not header.startswith(_MAGIC):
            raise TokenFileError(
                f"{path} begins with {header[: len(_MAGIC)]!r}, a Megatron index with {_MAGIC!r}: "
                f"the file is something else; {_REBUILD}"
            )
        if len(header) < _HEADER.size:
            raise TokenFileError(
                f"{path} has {size} bytes, its header alone takes {_HEADER.size}: "
                f"the file is truncated; {_REBUILD}"
            )
        _, version, code, num_sequences, num_borders = _HEADER.unpack(header)
        if version != _VERSION:
            raise TokenFileError(
                f"{path} has index version {version}, expected {_VERSION}: {_REBUILD}"
            )
        if code not in _DTYPE_OF_CODE:
            raise TokenFileError(
                f"{path} has dtype code {code}, expected an integer type "
                f"({', '.join(map(str, _DTYPE_OF_CODE))}): tokens are integers; {_REBUILD}"
            )
        expected = _HEADER.size + 12 * num_sequences + 8 * num_borders
        if size < expected:
            raise TokenFileError(
                f"{path} has {size:,} bytes, its header promises {expected:,} ({num_sequences:,} "
                f"sequences, {num_borders:,} document borders): the file is truncated; {_REBUILD}"
            )
        return np.dtype(_DTYPE_OF_CODE[code]), num_sequences, num_borders

    def _check_outer_borders(self, num_borders: int) -> None:
        """Check that documents begin with the first sequence and end with the last one."""
        if num_borders == 0:
            self._refuse_borders()
        last = self._borders_at + 8 * (num_borders - 1)
        if (
            self._read("<i8", self._borders_at, 1)[0] != 0
            or self._read("<i8", last, 1)[0] != self.num_sequences
        ):
            self._refuse_borders()

    def _refuse_borders(self) -> None:
        raise TokenFileError(
            f"{self.path} has document borders that do not rise from 0 to its "
            f"{self.num_sequences:,} sequences: the file is damaged; {_REBUILD}"
        )

    def _read(self, dtype: str, place: int, count: int) -> Int64Array:
        column = np.empty(count, dtype=dtype)
        self._read_into(column.view(np.uint8), place)
        return column.astype(np.int64, copy=False)

    def _read_into(self, target: ByteArray, place: int) -> None:
        if not read_into(self._file, target, place):
            raise TokenFileError(
                f"{self.path} ended at byte {os.fstat(self._file).st_size:,} while it was read, "
                "although it had more when it was opened: something changes it; wait until it is "
                "complete"
            )


class _DocumentSums:
    """Adds up the sequences of each document, also of one that spans pieces."""

    def __init__(self, token_bytes: int) -> None:
        self._token_bytes = token_bytes
        self._is_open = False  # whether the first document of the next piece has begun
        self._tokens = 0  # of it so far
        self._pointer = 0  # where it begins

    def add(self, piece: IndexPiece) -> Documents:
        """Return the documents that end in a piece."""
        if not self._is_open and piece.is_plain:
            return self._documents(piece, piece.lengths, piece.pointers)
        totals = np.concatenate(([0], np.cumsum(piece.lengths)))
        borders = np.concatenate(([0], piece.ends - piece.first_sequence))
        lengths = np.diff(totals[borders])
        pointers = np.append(piece.pointers, 0)[borders[:-1]]
        if self._is_open and len(lengths):
            lengths[0] += self._tokens
            pointers[0] = self._pointer
            self._is_open = False
        self._keep_rest(piece, int(borders[-1]))
        return self._documents(piece, lengths, pointers)

    def _keep_rest(self, piece: IndexPiece, begin: int) -> None:
        """Keep what lies behind the last document that ended."""
        if begin == len(piece.lengths):
            return
        if not self._is_open:
            self._is_open, self._tokens, self._pointer = True, 0, int(piece.pointers[begin])
        self._tokens += int(piece.lengths[begin:].sum())

    def _documents(self, piece: IndexPiece, lengths: Int64Array, pointers: Int64Array) -> Documents:
        shift = self._token_bytes.bit_length() - 1  # the size is a power of 2
        return Documents(piece.first_document, lengths, pointers >> shift)

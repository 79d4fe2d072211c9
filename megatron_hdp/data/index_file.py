"""The ``.idx`` half of a Megatron dataset: where each document lies and how long it is.

Layout (little endian): 9 bytes magic, ``uint64`` version, ``uint8`` dtype code, ``uint64`` number
of sequences ``n``, ``uint64`` number of document borders ``d``, ``int32[n]`` sequence lengths in
tokens, ``int64[n]`` byte pointers, ``int64[d]`` document borders (sequence indices, the first is
0).
"""

import os
import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_MOST_BYTES = 2**62  # of a .bin: sums with a sequence's bytes stay in 64 bits
_HEADER = struct.Struct("<9sQBQQ")
HEADER_BYTES = _HEADER.size
_REBUILD = "build the pair again with `megatron-hdp preprocess`"
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


@dataclass(frozen=True)
class DocumentIndex:
    """What an ``.idx`` says about its documents."""

    dtype: np.dtype[np.generic]
    """Integer type of the tokens in the ``.bin``."""
    lengths: Int64Array
    """Tokens of each document."""
    pointers: Int64Array
    """Byte in the ``.bin`` where each document begins."""
    num_bytes: int
    """Least size of the ``.bin`` that holds every document."""


def read_document_index(path: str | os.PathLike[str]) -> DocumentIndex:
    """Read and check an ``.idx`` file; a document of several sequences becomes one.

    Raises:
        TokenFileNotFoundError: there is no such file.
        TokenFileError: it is no index of version 1, is truncated, or contradicts itself.
    """
    path = os.fspath(path)
    if not os.path.isfile(path):
        raise TokenFileNotFoundError(
            f"no index file {path}: expected a Megatron .idx; give the prefix without its suffix, "
            "or make the pair with `megatron-hdp preprocess`"
        )
    dtype, sequence_lengths, pointers, borders = _read_arrays(path)
    _check_borders(path, sequence_lengths, borders)
    _check_pointers(path, pointers, sequence_lengths, dtype)
    ends = pointers + sequence_lengths * dtype.itemsize
    _check_contiguous(path, pointers, ends, borders)
    return DocumentIndex(
        dtype=dtype,
        lengths=_sum_by_document(sequence_lengths, borders),
        pointers=_first_pointers(pointers, borders),
        num_bytes=int(ends.max(initial=0)),
    )


def read_header(path: str) -> tuple[np.dtype[np.generic], int, int]:
    """Return token dtype, number of sequences and number of document borders of an ``.idx``.

    Raises:
        TokenFileError: it is no index of version 1, or is truncated.
    """
    size = os.path.getsize(path)
    with open(path, "rb") as stream:
        header = stream.read(HEADER_BYTES)
    if not header.startswith(_MAGIC):
        raise TokenFileError(
            f"{path} begins with {header[: len(_MAGIC)]!r}, a Megatron index with {_MAGIC!r}: "
            f"the file is something else; {_REBUILD}"
        )
    if len(header) < HEADER_BYTES:
        raise TokenFileError(
            f"{path} has {size} bytes, its header alone takes {HEADER_BYTES}: "
            f"the file is truncated; {_REBUILD}"
        )
    _, version, code, num_sequences, num_borders = _HEADER.unpack(header)
    if version != _VERSION:
        raise TokenFileError(f"{path} has index version {version}, expected {_VERSION}: {_REBUILD}")
    if code not in _DTYPE_OF_CODE:
        raise TokenFileError(
            f"{path} has dtype code {code}, expected an integer type "
            f"({', '.join(map(str, _DTYPE_OF_CODE))}): tokens are integers; {_REBUILD}"
        )
    expected = HEADER_BYTES + 12 * num_sequences + 8 * num_borders
    if size < expected:
        raise TokenFileError(
            f"{path} has {size:,} bytes, its header promises {expected:,} ({num_sequences:,} "
            f"sequences, {num_borders:,} document borders): the file is truncated; {_REBUILD}"
        )
    return np.dtype(_DTYPE_OF_CODE[code]), num_sequences, num_borders


def pack_header(dtype: np.dtype[np.generic], num_sequences: int, num_borders: int) -> bytes:
    """Return the header of an ``.idx``."""
    code = next(code for code, known in _DTYPE_OF_CODE.items() if np.dtype(known) == dtype)
    return _HEADER.pack(_MAGIC, _VERSION, code, num_sequences, num_borders)


def _read_arrays(path: str) -> tuple[np.dtype[np.generic], Int64Array, Int64Array, Int64Array]:
    """Return token dtype, sequence lengths, byte pointers and document borders as stored."""
    dtype, num_sequences, num_borders = read_header(path)
    return dtype, *_read_columns(path, num_sequences, num_borders)


def _read_columns(
    path: str, num_sequences: int, num_borders: int
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return lengths, pointers and borders; read, for a file that shrinks kills who maps it."""
    columns = []
    with open(path, "rb", buffering=0) as stream:
        stream.seek(HEADER_BYTES)
        for dtype, count in (("<i4", num_sequences), ("<i8", num_sequences), ("<i8", num_borders)):
            column = np.fromfile(stream, dtype=dtype, count=count)
            if len(column) < count:
                raise TokenFileError(
                    f"{path} ended at byte {stream.tell():,} while it was read, although it had "
                    "more when it was opened: something changes it; wait until it is complete"
                )
            columns.append(column.astype(np.int64, copy=False))
    lengths, pointers, borders = columns
    return lengths, pointers, borders


def _check_borders(path: str, sequence_lengths: Int64Array, borders: Int64Array) -> None:
    """Check that lengths are counts and that the borders cut the sequences into documents."""
    if len(sequence_lengths) and sequence_lengths.min() < 0:
        worst = int(sequence_lengths.argmin())
        raise TokenFileError(
            f"{path} gives sequence {worst} the length {sequence_lengths[worst]}, expected 0 or "
            f"more: the file is damaged; {_REBUILD}"
        )
    if (
        len(borders) == 0
        or borders[0] != 0
        or borders[-1] != len(sequence_lengths)
        or np.any(np.diff(borders) < 0)
    ):
        raise TokenFileError(
            f"{path} has document borders that do not rise from 0 to its {len(sequence_lengths):,} "
            f"sequences: the file is damaged; {_REBUILD}"
        )


def _check_pointers(
    path: str, pointers: Int64Array, sequence_lengths: Int64Array, dtype: np.dtype[np.generic]
) -> None:
    """Check that sequences lie in whole tokens, each by itself or just where another one lies."""
    num_bytes = sequence_lengths * dtype.itemsize
    wrong = (pointers < 0) | (pointers > _MOST_BYTES) | (pointers % dtype.itemsize != 0)
    if wrong.any():
        first = int(np.argmax(wrong))
        raise TokenFileError(
            f"{path} has the byte pointer {pointers[first]} for sequence {first}, expected a "
            f"multiple of {dtype.itemsize} (bytes of a token) from 0 to {_MOST_BYTES}: the file is "
            f"damaged; {_REBUILD}"
        )
    filled = np.flatnonzero(num_bytes)
    starts, ends = pointers[filled], (pointers + num_bytes)[filled]
    if np.any(starts[1:] < ends[:-1]):  # else they rise, as those that Megatron writes
        order = np.argsort(starts, kind="stable")
        filled, starts, ends = filled[order], starts[order], ends[order]
    is_again = (starts[1:] == starts[:-1]) & (ends[1:] == ends[:-1])  # repeated on purpose
    overlaps = (starts[1:] < ends[:-1]) & ~is_again
    if overlaps.any():
        first = int(np.argmax(overlaps))
        raise TokenFileError(
            f"{path}: sequence {filled[first + 1]} begins at byte {starts[first + 1]:,}, inside "
            f"sequence {filled[first]}, which ends at byte {ends[first]:,}: the file is damaged; "
            f"{_REBUILD}"
        )


def _check_contiguous(
    path: str, pointers: Int64Array, ends: Int64Array, borders: Int64Array
) -> None:
    """Check that the sequences of one document touch."""
    jumps = np.flatnonzero(pointers[1:] != ends[:-1]) + 1
    inside = jumps[borders[np.searchsorted(borders, jumps)] != jumps]
    if len(inside):
        document = int(np.searchsorted(borders, inside[0], side="right")) - 1
        raise TokenFileError(
            f"{path}: sequence {inside[0]} of document {document} does not begin where the one "
            f"before it ends (byte {pointers[inside[0]]:,}, expected {ends[inside[0] - 1]:,}): "
            f"a document must be contiguous; {_REBUILD}"
        )


def _sum_by_document(sequence_lengths: Int64Array, borders: Int64Array) -> Int64Array:
    """Add up the sequences of each document."""
    if np.array_equal(borders, np.arange(len(sequence_lengths) + 1)):
        return sequence_lengths
    return np.diff(np.concatenate(([0], np.cumsum(sequence_lengths)))[borders])


def _first_pointers(pointers: Int64Array, borders: Int64Array) -> Int64Array:
    """Return the pointer of each document's first sequence (0 for a document that has none)."""
    return np.append(pointers, 0)[borders[:-1]]

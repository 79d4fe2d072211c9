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
_HEADER = struct.Struct("<9sQBQQ")
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
    ends = pointers + sequence_lengths * dtype.itemsize
    _check_contiguous(path, pointers, ends, borders)
    return DocumentIndex(
        dtype=dtype,
        lengths=_sum_by_document(sequence_lengths, borders),
        pointers=_first_pointers(pointers, borders),
        num_bytes=int(ends.max(initial=0)),
    )


def _read_arrays(path: str) -> tuple[np.dtype[np.generic], Int64Array, Int64Array, Int64Array]:
    """Return token dtype, sequence lengths, byte pointers and document borders as stored."""
    size = os.path.getsize(path)
    with open(path, "rb") as stream:
        header = stream.read(_HEADER.size)
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
        raise TokenFileError(f"{path} has index version {version}, expected {_VERSION}: {_REBUILD}")
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
    raw = np.memmap(path, mode="r", dtype=np.uint8)
    lengths_end = _HEADER.size + 4 * num_sequences
    pointers_end = lengths_end + 8 * num_sequences
    return (
        np.dtype(_DTYPE_OF_CODE[code]),
        raw[_HEADER.size : lengths_end].view("<i4").astype(np.int64),
        raw[lengths_end:pointers_end].view("<i8").astype(np.int64),
        raw[pointers_end:expected].view("<i8").astype(np.int64),
    )


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


def _check_contiguous(
    path: str, pointers: Int64Array, ends: Int64Array, borders: Int64Array
) -> None:
    """Check that sequences lie inside the ``.bin`` and that those of one document touch."""
    if len(pointers) and pointers.min() < 0:
        raise TokenFileError(
            f"{path} has a negative byte pointer ({pointers.min()}), expected 0 or more: "
            f"the file is damaged; {_REBUILD}"
        )
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

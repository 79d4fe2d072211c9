"""What must hold of an ``.idx`` before anything is read where it points: piece by piece."""

from collections.abc import Iterator

import numpy as np

from megatron_hdp.arrays import Int64Array
from megatron_hdp.data.index_file import Documents, IndexFile, IndexPiece, TokenFileError

_MOST_BYTES = 2**62  # of a .bin: sums with a sequence's bytes stay in 64 bits
_PIECE = 1 << 18  # sequences compared at once
_REBUILD = "the file is damaged; build the pair again with `megatron-hdp preprocess`"


class IndexChecks:
    """Checks the pieces of an ``.idx``, to be given in order, and whatever spans them.

    Attributes:
        num_bytes: least size of the ``.bin`` that holds every sequence so far.
    """

    def __init__(self, index: IndexFile) -> None:
        """Begin with the index's first piece."""
        self.num_bytes = 0
        self._index = index
        self._end = 0  # byte where the latest sequence ends
        self._filled_end = 0  # the same of the latest one with a token
        self._rises = True
        self._is_border = True  # whether a document begins with the next sequence

    def documents(self) -> Iterator[Documents]:
        """The index's documents, piece by piece, each once it has been checked.

        Raises:
            TokenFileError: the index contradicts itself; after the last piece, or before.
        """
        return self._index.documents(self._checked())

    def _checked(self) -> Iterator[IndexPiece]:
        for piece in self._index.pieces():
            self._check(piece)
            yield piece
        if not self._rises:
            self._check_in_order_of_bytes()

    def _check(self, piece: IndexPiece) -> None:
        if len(piece.lengths) == 0:
            self._is_border = True
            return
        _check_lengths(self._index.path, piece)
        token_bytes = self._index.dtype.itemsize
        _check_pointers(self._index.path, piece, token_bytes)
        ends = piece.pointers + piece.lengths * token_bytes
        self._check_contiguous(piece, ends)
        self._note_whether_they_rise(piece, ends)
        self.num_bytes = max(self.num_bytes, int(ends.max()))
        self._end = int(ends[-1])
        self._is_border = len(piece.ends) > 0 and piece.ends[-1] == piece.last_sequence

    def _check_contiguous(self, piece: IndexPiece, ends: Int64Array) -> None:
        """Check that the sequences of one document touch."""
        if self._is_border and piece.is_plain:
            return
        before = np.concatenate(([self._end], ends[:-1]))
        jumps = np.flatnonzero(piece.pointers != before)
        numbers = jumps + piece.first_sequence
        starts = piece.ends if not self._is_border else np.append(piece.first_sequence, piece.ends)
        inside = jumps[~np.isin(numbers, starts)]
        if len(inside):
            first = int(inside[0])
            sequence = first + piece.first_sequence
            document = piece.first_document + int(
                np.searchsorted(piece.ends, sequence, side="right")
            )
            raise TokenFileError(
                f"{self._index.path}: sequence {sequence} of document {document} does not begin "
                f"where the one before it ends (byte {piece.pointers[first]:,}, expected "
                f"{before[first]:,}): a document must be contiguous; {_REBUILD}"
            )

    def _note_whether_they_rise(self, piece: IndexPiece, ends: Int64Array) -> None:
        """Those that Megatron writes do, and then no two of them overlap."""
        starts = piece.pointers
        if not piece.lengths.all():
            filled = np.flatnonzero(piece.lengths)
            starts, ends = starts[filled], ends[filled]
        if len(starts) == 0:
            return
        if starts[0] < self._filled_end or np.any(starts[1:] < ends[:-1]):
            self._rises = False
        self._filled_end = int(ends[-1])

    def _check_in_order_of_bytes(self) -> None:
        """Check that each sequence lies by itself or just where another one lies.

        Takes 20 bytes of memory a sequence, and half as much again while it sorts.
        """
        lengths, pointers = self._index.sequences()
        order = np.argsort(pointers, kind="stable")
        if not lengths.all():
            order = order[lengths[order] > 0]
        for begin in range(0, len(order), _PIECE):
            rows = order[begin : begin + _PIECE + 1]  # the last one begins the next piece
            starts = pointers[rows]
            ends = starts + lengths[rows].astype(np.int64) * self._index.dtype.itemsize
            is_again = (starts[1:] == starts[:-1]) & (ends[1:] == ends[:-1])  # repeated on purpose
            overlaps = (starts[1:] < ends[:-1]) & ~is_again
            if overlaps.any():
                first = int(np.argmax(overlaps))
                raise TokenFileError(
                    f"{self._index.path}: sequence {rows[first + 1]} begins at byte "
                    f"{starts[first + 1]:,}, inside sequence {rows[first]}, which ends at byte "
                    f"{ends[first]:,}: {_REBUILD}"
                )


def _check_lengths(path: str, piece: IndexPiece) -> None:
    if piece.lengths.min() < 0:
        worst = int(piece.lengths.argmin())
        raise TokenFileError(
            f"{path} gives sequence {piece.first_sequence + worst} the length "
            f"{piece.lengths[worst]}, expected 0 or more: {_REBUILD}"
        )


def _check_pointers(path: str, piece: IndexPiece, token_bytes: int) -> None:
    """Check that sequences begin at whole tokens."""
    pointers, spare_bits = piece.pointers, token_bytes - 1  # the size is a power of 2
    odd = np.bitwise_or.reduce(pointers) & spare_bits
    if odd or pointers.min() < 0 or pointers.max() > _MOST_BYTES:
        wrong = (pointers < 0) | (pointers > _MOST_BYTES) | (pointers & spare_bits != 0)
        first = int(np.argmax(wrong))
        raise TokenFileError(
            f"{path} has the byte pointer {pointers[first]} for sequence "
            f"{piece.first_sequence + first}, expected a multiple of {token_bytes} (bytes of a "
            f"token) from 0 to {_MOST_BYTES}: {_REBUILD}"
        )

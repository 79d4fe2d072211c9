"""How documents become sequences: which of them, how long, and what of empty ones, decided once."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from megatron_hdp.arrays import Int64Array
from megatron_hdp.data.index_file import Documents

LONG_SEQUENCE_POLICIES = ("error", "truncate", "split")
CUT_THEM = "use --hdp-long-sequence truncate or split, or raise --seq-length"
_MOST_ROWS = 1 << 18  # made at once, however many a document gives


@dataclass(frozen=True)
class Rows:
    """Neighbouring rows of a table of sequences."""

    begins: Int64Array
    """Place of each one's first token in the token file, in tokens."""
    lengths: Int64Array
    """Tokens of each."""
    documents: Int64Array
    """Number of each one's document in the token file."""


@dataclass(frozen=True)
class Cutting:
    """Makes rows of documents, piece by piece."""

    max_length: int
    """The context length in tokens."""
    long_sequence: str
    """What happens to a longer document: ``error``, ``truncate`` (its beginning is kept) or
    ``split`` (into pieces of ``max_length``, the last one shorter)."""
    documents: range
    """The documents to take."""
    num_documents: int
    """Of the whole token file."""
    remedy: str = CUT_THEM
    """What an error says of documents that are too long."""

    @classmethod
    def of(
        cls,
        num_documents: int,
        *,
        max_length: int,
        long_sequence: str,
        documents: range | None,
        remedy: str = CUT_THEM,
    ) -> "Cutting":
        """Return the cutting for some of a file's documents, all when ``None``.

        Raises:
            ValueError: the context length is not positive, the policy is none, or the documents do
                not lie together.
        """
        if max_length < 1:
            raise ValueError(f"the context length is {max_length}, expected at least 1 token")
        if long_sequence not in LONG_SEQUENCE_POLICIES:
            raise ValueError(
                f"long-sequence policy {long_sequence!r}: expected one of "
                f"{', '.join(LONG_SEQUENCE_POLICIES)}"
            )
        taken = range(num_documents)
        if documents is not None:
            if documents.step != 1:
                raise ValueError(f"documents {documents}: expected contiguous documents (step 1)")
            taken = taken[documents.start : documents.stop]
        return cls(max_length, long_sequence, taken, num_documents, remedy)

    def chosen(self, piece: Documents) -> Documents:
        """Return those documents of a piece that are to be taken."""
        first, stop = self.documents.start - piece.first, self.documents.stop - piece.first
        if first <= 0 and stop >= len(piece.lengths):
            return piece
        first = min(max(first, 0), len(piece.lengths))
        here = slice(first, max(stop, first))
        return Documents(piece.first + first, piece.lengths[here], piece.begins[here])

    def rows(self, piece: Documents) -> Iterator[Rows]:
        """The rows of a piece of documents, in their order, at most `_MOST_ROWS` at once."""
        taken = self.chosen(piece)
        lengths, begins = taken.lengths, taken.begins
        numbers = np.arange(taken.first, taken.first + len(lengths))
        if not lengths.all():
            filled = np.flatnonzero(lengths)
            lengths, begins, numbers = lengths[filled], begins[filled], numbers[filled]
        if lengths.max(initial=0) <= self.max_length:
            yield Rows(begins, lengths, numbers)
        elif self.long_sequence == "truncate":
            yield Rows(begins, np.minimum(lengths, self.max_length), numbers)
        else:
            yield from self._split(begins, lengths, numbers)

    def _split(self, begins: Int64Array, totals: Int64Array, numbers: Int64Array) -> Iterator[Rows]:
        """Cut documents into pieces of the context length, the last one shorter."""
        num_pieces = -(-totals // self.max_length)
        ends = np.cumsum(num_pieces)  # of each document, in rows
        firsts = ends - num_pieces
        for row in range(0, int(ends[-1]), _MOST_ROWS):
            stop = min(row + _MOST_ROWS, int(ends[-1]))
            span = slice(
                int(np.searchsorted(ends, row, side="right")),
                int(np.searchsorted(firsts, stop, side="left")),
            )
            counts = np.minimum(ends[span], stop) - np.maximum(firsts[span], row)
            starts = (np.arange(row, stop) - np.repeat(firsts[span], counts)) * self.max_length
            lengths = np.minimum(np.repeat(totals[span], counts) - starts, self.max_length)
            yield Rows(
                np.repeat(begins[span], counts) + starts, lengths, np.repeat(numbers[span], counts)
            )


@dataclass
class Survey:
    """What a cutting will make of documents, counted before it is made."""

    cutting: Cutting
    num_sequences: int = 0
    num_tokens: int = 0
    num_empty: int = 0
    num_long: int = 0
    """Documents above the context length."""
    longest_document: int = 0
    _first_long: tuple[int, int] = (0, 0)  # its number and tokens

    @classmethod
    def of(cls, cutting: Cutting, documents: Iterable[Documents]) -> "Survey":
        """Count documents that come piece by piece.

        Raises:
            ValueError: a document is too long under ``error``, or no sequence is left.
        """
        survey = cls(cutting)
        for piece in documents:
            survey._add(cutting.chosen(piece))
        survey._check()
        return survey

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return min(self.longest_document, self.cutting.max_length)

    @property
    def num_truncated(self) -> int:
        """Documents that will be cut to the context length."""
        return self.num_long if self.cutting.long_sequence == "truncate" else 0

    @property
    def num_split(self) -> int:
        """Documents that will be cut into several sequences."""
        return self.num_long if self.cutting.long_sequence == "split" else 0

    @property
    def is_plain(self) -> bool:
        """Whether row ``r`` is document ``first + r``."""
        return self.num_empty == 0 and self.num_split == 0

    def _add(self, piece: Documents) -> None:
        lengths, most = piece.lengths, self.cutting.max_length
        if len(lengths) == 0:
            return
        num_filled = int(np.count_nonzero(lengths))
        self.num_empty += len(lengths) - num_filled
        self.num_sequences += num_filled
        self.num_tokens += int(lengths.sum())
        longest = int(lengths.max())
        self.longest_document = max(self.longest_document, longest)
        if longest <= most:
            return
        long = np.flatnonzero(lengths > most)
        if not self.num_long:
            self._first_long = piece.first + int(long[0]), int(lengths[long[0]])
        self.num_long += len(long)
        if self.cutting.long_sequence == "split":
            self.num_sequences += int(((lengths[long] - 1) // most).sum())
        else:
            self.num_tokens -= int((lengths[long] - most).sum())

    def _check(self) -> None:
        cutting = self.cutting
        if not self.num_sequences:
            raise ValueError(
                f"no sequence to train on: {len(cutting.documents):,} documents chosen of "
                f"{cutting.num_documents:,}, none with a token; check --data-path and --split"
            )
        if self.num_long and cutting.long_sequence == "error":
            number, length = self._first_long
            raise ValueError(
                f"document {number} has {length:,} tokens, the context length is "
                f"{cutting.max_length:,} ({self.num_long:,} documents are longer, the longest has "
                f"{self.longest_document:,}): {cutting.remedy}"
            )

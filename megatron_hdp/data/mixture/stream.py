"""The sequences of one source: an endless chain of epochs, each its own permutation of the rows.

A row that is longer than the schedule allows is cut when it is drawn, and one without a token is
passed over. So a source's position is a number of rows, whatever the schedule was and will be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megatron_hdp.arrays import Int64Array
from megatron_hdp.data.shuffles import Shuffle


class Rows(Protocol):
    """Metadata of a source's sequences."""

    num_rows: int
    """Sequences of an epoch."""

    def lengths(self, rows: Int64Array) -> Int64Array:
        """Return tokens of rows; one without a token is passed over."""

    def num_labels(self, rows: Int64Array, lengths: Int64Array) -> Int64Array:
        """Return tokens of rows of these lengths, from the first, that have a next one."""

    def num_trained(self, rows: Int64Array, starts: Int64Array, stops: Int64Array) -> Int64Array:
        """Return of the labelled tokens ``[start, stop)`` of rows those whose label is trained."""


@dataclass(frozen=True)
class Pieces:
    """Sequences of one source in the order in which they are drawn, ``[n]`` each."""

    numbers: Int64Array
    """The row's number since the start of training, over all epochs."""
    rows: Int64Array
    starts: Int64Array
    lengths: Int64Array
    num_labels: Int64Array
    num_loss_tokens: Int64Array
    stop: int
    """The row number up to which rows were looked at."""
    is_last: bool
    """Whether the source ends behind them."""
    members: Pieces | None = None
    """Of groups: the sequences that each stands for, as many of each."""

    def __len__(self) -> int:
        return len(self.rows)

    def after(self, count: int) -> tuple[int, int]:
        """Return the row number and offset behind the first ``count`` of them, at least one.

        Rows without a token behind them are not counted yet: how many were looked at is chance.
        """
        last = int(self.numbers[count - 1])
        if count < len(self) and self.numbers[count] == last:
            return last, int(self.starts[count])
        return last + 1, 0


class SourceStream:
    """Draws from one source."""

    def __init__(
        self,
        rows: Rows,
        shuffle: Shuffle,
        *,
        splits_long: bool,
        max_epochs: int | None = None,
        group: int = 1,
    ) -> None:
        """Set what is drawn, for ``max_epochs`` or (None) for ever.

        ``splits_long``: a row that is too long gives several sequences, rather than one that lacks
        the row's end. ``group``: so many neighbouring rows, the sides of a pair, are drawn as one;
        none of them is cut.
        """
        self.rows = rows
        self._group = group
        self._num_rows = rows.num_rows // group
        self._shuffle = shuffle
        self._splits_long = splits_long
        self._end = None if max_epochs is None else max_epochs * self._num_rows

    def has_ended(self, number: int) -> bool:
        """Return whether nothing is left from a row number on."""
        if self._end is None:
            return False
        count = 1
        while number < self._end:  # rows without a token are nothing; mostly the first has one
            stop = min(number + count, self._end)
            if self.rows.lengths(self._members(self._rows_of(number, stop))).any():
                return False
            number, count = stop, 2 * count
        return True

    def pieces(self, number: int, offset: int, count: int, max_length: int) -> Pieces:
        """Return the sequences of the next ``count`` rows, fewer where the source ends.

        Of the first row, by its number since the start of training, ``offset`` tokens are drawn.
        """
        stop = number + count if self._end is None else min(number + count, self._end)
        rows = self._rows_of(number, stop)
        if self._group > 1:
            return self._groups(rows, number, stop)
        lengths = self.rows.lengths(rows)
        labels = self.rows.num_labels(rows, lengths)
        numbers = np.arange(number, stop)
        if not lengths.all():
            kept = np.flatnonzero(lengths)
            numbers, rows, lengths, labels = (
                column[kept] for column in (numbers, rows, lengths, labels)
            )
        starts = np.zeros_like(lengths)
        if offset and len(starts):
            starts[0] = offset
        if len(lengths) and (offset or int(lengths.max()) > max_length):
            cut = self._split if self._splits_long else self._truncate
            chosen, starts, lengths, labels = cut(starts, lengths, labels, max_length)
            numbers, rows = numbers[chosen], rows[chosen]
        return Pieces(
            numbers=numbers,
            rows=rows,
            starts=starts,
            lengths=lengths,
            num_labels=labels,
            num_loss_tokens=self.rows.num_trained(rows, starts, starts + labels),
            stop=stop,
            is_last=stop == self._end,
        )

    def _groups(self, groups: Int64Array, number: int, stop: int) -> Pieces:
        """Return groups as they are: none is cut, and none has no token."""
        rows = self._members(groups)
        lengths = self.rows.lengths(rows)
        starts = np.zeros_like(lengths)
        labels = self.rows.num_labels(rows, lengths)
        trained = self.rows.num_trained(rows, starts, labels)
        numbers, is_last = np.arange(number, stop), stop == self._end
        of_each = np.repeat(numbers, self._group)
        members = Pieces(of_each, rows, starts, lengths, labels, trained, stop, is_last)
        return Pieces(
            numbers=numbers,
            rows=groups,
            starts=np.zeros_like(groups),
            lengths=self._sums(lengths),
            num_labels=self._sums(labels),
            num_loss_tokens=self._sums(trained),
            stop=stop,
            is_last=is_last,
            members=members,
        )

    def _sums(self, values: Int64Array) -> Int64Array:
        """Return the sum over the rows of each group."""
        found: Int64Array = values.reshape(-1, self._group).sum(axis=1)
        return found

    def _members(self, groups: Int64Array) -> Int64Array:
        """Return the rows of groups, those of each one after the other."""
        if self._group == 1:
            return groups
        found: Int64Array = (self._group * groups[:, None] + np.arange(self._group)).ravel()
        return found

    def _rows_of(self, number: int, stop: int) -> Int64Array:
        parts = [np.zeros(0, dtype=np.int64)]
        while number < stop:
            epoch, first = divmod(number, self._num_rows)
            part = self._shuffle.rows(epoch, first, min(stop - number, self._num_rows - first))
            parts.append(part)
            number += len(part)
        return np.concatenate(parts)

    @staticmethod
    def _split(
        starts: Int64Array, lengths: Int64Array, labels: Int64Array, max_length: int
    ) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
        """Return for every piece the row's place here, start, tokens and labelled tokens."""
        left = lengths - starts
        num_pieces = -(-left // max_length)
        chosen = np.repeat(np.arange(len(left)), num_pieces)
        first = np.cumsum(num_pieces) - num_pieces
        begins = starts[chosen] + (np.arange(len(chosen)) - first[chosen]) * max_length
        sizes = np.minimum(lengths[chosen] - begins, max_length)
        return chosen, begins, sizes, np.clip(labels[chosen] - begins, 0, sizes)

    @staticmethod
    def _truncate(
        starts: Int64Array, lengths: Int64Array, labels: Int64Array, max_length: int
    ) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
        """Return the same for one piece a row; the last token of one that is cut has no label."""
        left = lengths - starts
        sizes = np.minimum(left, max_length)
        found = np.minimum(labels - starts, sizes - (left > max_length))
        return np.arange(len(left)), starts, sizes, found

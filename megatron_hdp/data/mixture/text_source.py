"""A source of text or conversations that becomes tokens as it is drawn: a row is a record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_hdp.arrays import BoolArray, Int64Array
from megatron_hdp.data.mixture.source import Source, digest
from megatron_hdp.data.on_the_fly import Decoder, RecordIndex, TextEstimate, lengths_of


@dataclass(frozen=True, kw_only=True)
class TextSource(Source):
    """A source that is tokenised on the fly.

    Its rows are records; those that are empty or bad are rows without a token. All but their number
    is estimated.
    """

    is_estimated = True

    index: RecordIndex
    decoder: Decoder
    recipe: str
    """All but the files that the tokens depend on."""
    estimate: TextEstimate
    max_length: int
    """``--seq-length``."""

    @property
    def bad(self) -> int:
        """Bad records that this process has come upon."""
        return self.decoder.num_bad

    @property
    def longest(self) -> int:
        """Tokens that a row has at most."""
        return self.max_length

    @property
    def mean_length(self) -> float:
        """Tokens of a row on average, about, at least 1."""
        return max(self.estimate.mean_length, 1.0)

    @property
    def index_bytes(self) -> int:
        """Bytes of the files that say where its records lie."""
        return self.index.num_bytes

    @property
    def private_bytes(self) -> int:
        """None: they are mapped."""
        return 0

    def part(self, first_row: int, num_rows: int) -> TextSource:
        """Return a run of its rows as a source."""
        return replace(self, first_row=self.first_row + first_row, num_rows=num_rows)

    def lengths(self, rows: Int64Array) -> Int64Array:
        """Return tokens of rows; 0 of one that is empty or bad.

        Raises:
            ValueError: too many records are bad, or a file has changed, for two.
        """
        return lengths_of(self.decoder.rows(rows + self.first_row))

    def num_labels(self, rows: Int64Array, lengths: Int64Array) -> Int64Array:
        """Return tokens of rows of these lengths, from the first, that have a next one."""
        return np.maximum(lengths - 1, 0)

    def num_trained(self, rows: Int64Array, starts: Int64Array, stops: Int64Array) -> Int64Array:
        """Return of the labelled tokens ``[start, stop)`` of rows those whose label is trained."""
        if self._is_text:
            return stops - starts
        found = self.decoder.rows(rows + self.first_row)
        counts = np.fromiter((one.num_trained for one in found), np.int64, len(found))
        cut = (starts > 0) | (stops < lengths_of(found) - 1)
        for i in np.flatnonzero(cut).tolist():
            mask = found[i].is_trained
            if mask is not None:  # a label is the token after
                counts[i] = mask[starts[i] + 1 : stops[i] + 1].sum()
        return counts

    def is_trained(self, row: int, start: int, stop: int) -> BoolArray:
        """Return which of the labelled tokens ``[start, stop)`` of a row have a trained label."""
        if self._is_text:
            return np.ones(stop - start, dtype=np.bool_)
        (found,) = self.decoder.rows(np.array([row + self.first_row]))
        assert found.is_trained is not None, "a row without a token is not drawn"
        return found.is_trained[start + 1 : stop + 1].copy()

    def tokens(self, row: int, start: int, count: int) -> Int64Array:
        """Return tokens of a row from its token ``start`` on."""
        (found,) = self.decoder.rows(np.array([row + self.first_row]))
        return found.tokens[start : start + count].astype(np.int64)

    def documents(self, rows: Int64Array) -> Int64Array:
        """Return the numbers of rows' records."""
        return rows + self.first_row

    def size(self, unit: str) -> float:
        """Return about how large it is, in the unit of the weights."""
        if unit == "sequences":
            return float(self.num_rows)
        if unit == "tokens":
            return self.estimate.mean_length * self.num_rows
        return self.estimate.mean_trained * self.num_rows

    def _all_rows(self) -> tuple[int, int]:
        num_rows = len(self.index)
        return num_rows, digest(self.recipe, num_rows, self.index.files.outline())

    def contents(self) -> int:
        """Return a fingerprint of samples of its text."""
        return self.index.files.samples()

    def words(self, rows: Sequence[int]) -> str:
        """Return what a message calls the records of rows: files and lines."""
        return " and ".join(self.index.where(self.document(row)) for row in rows)

    def describe(self, use: str, name: str) -> str:
        """Return how many rows are ``use``, and about how many tokens they have."""
        long = "" if self.long_sequence == "error" else ", longer ones are truncated"
        return (
            f"{self.num_rows:,} records{name} {use}, about {self.size('tokens'):,.0f} tokens "
            f"(tokenised on the fly{long})"
        )

    @property
    def _is_text(self) -> bool:
        return self.index.files.kind == "text"

"""How often each length occurs: all that is said of lengths follows from it, exactly.

It is small however many sequences there are: ``d`` different lengths take at least ``d * d / 2``
tokens, so 10^12 tokens have at most 1.4 million of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from megatron_hdp.arrays import Int64Array

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)


@dataclass(frozen=True)
class Histogram:
    """Different lengths, which rise, and how many sequences have each, ``[d]``."""

    lengths: Int64Array
    counts: Int64Array

    @classmethod
    def of(cls, pieces: Iterable[Int64Array]) -> Histogram:
        """Count lengths that come piece by piece; there is at least one."""
        found = cls(*np.zeros((2, 0), dtype=np.int64))
        for piece in pieces:
            found = found._with(*np.unique(piece, return_counts=True))
        assert len(found.lengths), "no sequence"
        return found

    @property
    def num_sequences(self) -> int:
        """Sequences of all lengths."""
        return int(self.counts.sum())

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return int(self.lengths @ self.counts)

    @property
    def shortest(self) -> int:
        """Tokens of the shortest sequence."""
        return int(self.lengths[0])

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return int(self.lengths[-1])

    @property
    def mean(self) -> float:
        """Tokens of a sequence on average."""
        return self.num_tokens / self.num_sequences

    def quantile(self, share: float) -> int:
        """Return the length at a share of the sequences in rising order, no smaller one."""
        place = int(np.ceil(share * (self.num_sequences - 1)))
        return int(self.lengths[np.searchsorted(np.cumsum(self.counts), place, side="right")])

    def token_shares(self) -> dict[int, float]:
        """Return by power of two the share of tokens in sequences that are at most so long.

        Those that fit into the power before it are not among them. From the first power with a
        sequence on none is left out.
        """
        powers = np.ceil(np.log2(self.lengths)).astype(np.int64)
        tokens = np.bincount(powers, weights=(self.lengths * self.counts).astype(np.float64))
        return {
            2**power: float(tokens[power] / self.num_tokens)
            for power in range(int(powers[0]), len(tokens))
        }

    def _with(self, lengths: Int64Array, counts: Int64Array) -> Histogram:
        both, places = np.unique(np.concatenate([self.lengths, lengths]), return_inverse=True)
        total = np.zeros(len(both), dtype=np.int64)
        np.add.at(total, places, np.concatenate([self.counts, counts]))
        return Histogram(both.astype(np.int64), total)

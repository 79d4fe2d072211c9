"""What a constructor was given of a step, and what of it is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_hdp.arrays import BoolArray, Int64Array
from megatron_hdp.data.steps import (
    LostSource,
    RankShare,
    RankStep,
    Reader,
    StepTotals,
    read_step,
)
from megatron_hdp.data_plane.roles.loading import Loaded, Wanted


class Fetched:
    """Pieces that were fetched, as a `data.steps.TokenSource`.

    Of a lost source every token is 0 and none is trained, also of pieces that came.

    Attributes:
        lost: sources that were asked in vain, by name, and why.
    """

    def __init__(self, names: Sequence[str]) -> None:
        """Begin without any.

        Args:
            names: of the sources.
        """
        self._names = names
        self.lost: dict[str, str] = {}
        self._tokens: dict[tuple[int, int, int, int], Int64Array] = {}
        self._trained: dict[tuple[int, int, int, int], BoolArray] = {}

    def add(self, source: int, wanted: Wanted, loaded: Loaded) -> None:
        """Take what a loader has answered."""
        tokens = loaded.tokens.astype(np.int64)
        if len(tokens) != wanted.num_tokens:
            raise RuntimeError(
                f"a loader sent {len(tokens):,} tokens, expected {wanted.num_tokens:,}"
            )
        num_labels = int(wanted.num_labelled.sum())
        trained = np.ones(num_labels, dtype=np.bool_)
        if loaded.trained is not None:
            trained = np.unpackbits(loaded.trained, count=num_labels).view(np.bool_)
        at = label_at = 0
        for row, start, count, labelled in zip(
            wanted.rows.tolist(),
            wanted.starts.tolist(),
            wanted.counts.tolist(),
            wanted.num_labelled.tolist(),
            strict=True,
        ):
            self._tokens[source, row, start, count] = tokens[at : at + count]
            end = label_at + labelled
            self._trained[source, row, start, start + labelled] = trained[label_at:end]
            at, label_at = at + count, end

    def step(self, totals: StepTotals, share: RankShare, reader: Reader) -> RankStep:
        """Return a rank's step, and which of its sequences are lost."""
        found = read_step(totals, share, reader, self)
        if not self.lost or not (reader.reads_tokens or reader.reads_mask):
            return found
        lost = []
        for i, name in enumerate(self._names):
            ids = share.ids[share.sources == i].tolist()
            if name in self.lost and ids:
                lost.append(LostSource(name, self.lost[name], tuple(ids)))
        return replace(found, lost=tuple(lost))

    def tokens(self, source: int, row: int, start: int, count: int) -> Int64Array:
        """Return tokens of a row."""
        if self._names[source] in self.lost:
            return np.zeros(count, dtype=np.int64)
        return self._tokens[source, row, start, count]

    def is_trained(self, source: int, row: int, start: int, stop: int) -> BoolArray:
        """Return which of the labelled tokens ``[start, stop)`` of a row have a trained label."""
        if self._names[source] in self.lost:
            return np.zeros(stop - start, dtype=np.bool_)
        return self._trained[source, row, start, stop]

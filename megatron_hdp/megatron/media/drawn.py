"""The pictures of a step that was drawn from sources of data."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from megatron_hdp.arrays import BoolArray, Int64Array
from megatron_hdp.data.mixture import Corpus, MediaSource, Step
from megatron_hdp.megatron.media.items import MediaItem


def items_of(corpus: Corpus, step: Step) -> list[MediaItem]:
    """Those of a step's sequences; nothing is read of their files."""
    found: list[MediaItem] = []
    columns = (step.sources, step.rows, step.lengths)
    for i, one in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        source, row, length = corpus.sources[one[0]], one[1], one[2]
        if isinstance(source, MediaSource):
            places = source.items(row, length)
            found += [MediaItem(sequence=i, start=at, data=picture) for at, picture in places]
    return found


@dataclass(eq=False)
class DrawnItems:
    """A step's sequences as an `ItemHolder`: their tokens are elsewhere, with the ranks."""

    media: list[MediaItem]
    lengths: Int64Array
    offsets: Int64Array
    loss_mask: BoolArray
    drawn: Step

    @classmethod
    def of(cls, corpus: Corpus, step: Step) -> DrawnItems:
        """Those of a step."""
        lengths = step.lengths.astype(np.int64)
        mask = np.ones(int(lengths.sum()), dtype=np.bool_)
        return cls(items_of(corpus, step), lengths, np.cumsum(lengths) - lengths, mask, step)

    def step(self) -> Step:
        """The step itself."""
        return self.drawn

    def places(self) -> list[int]:
        """Of each item, its place among the pictures of its row."""
        counts: Counter[int] = Counter()
        found = []
        for one in self.media:
            found.append(counts[one.sequence])
            counts[one.sequence] += 1
        return found

"""Parts of a micro-batch: its tokens, cut in order into pieces that take equal time.

A stage of a pipeline hands on a part while it computes the next one, so that the next stage begins
after a part, not after the whole. A query of a part sees the keys of the parts before it, so the
time of a sequence's first ``x`` tokens grows like ``x^2 + linear_tokens x``: early parts are
longer. What is sharded over a ring and what lies whole on a member are cut each by itself.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_NEAR = 1 / 8
"""A cut that lies nearer to a border of sequences than this share of a part goes to the border."""


class Piece(NamedTuple):
    """Neighbouring tokens of one of the sequences that were cut."""

    sequence: int
    """Its place among them."""
    first: int
    stop: int


def cut_in_parts(
    lengths: Sequence[int], num_parts: int, unit: int, linear_tokens: float
) -> list[list[Piece]]:
    """What each part holds of sequences that follow each other.

    Args:
        lengths: tokens of each sequence.
        num_parts: at least 1; those that nothing is left for are empty.
        unit: sequences are cut at multiples of it, so that only the end of one needs padding.
        linear_tokens: what a token takes besides attention, in keys that it could see instead.
    """

    def time_of(tokens: int) -> float:
        return tokens * (tokens + linear_tokens)

    ends = np.cumsum([time_of(length) for length in lengths]) if lengths else np.zeros(0)
    begins = np.concatenate([[0.0], ends])[:-1]
    part_s = float(ends[-1]) / num_parts if len(ends) else 0.0
    cuts = []
    for number in range(1, num_parts):
        at = number * part_s
        i = min(int(np.searchsorted(ends, at)), len(lengths) - 1)
        if i < 0 or at - begins[i] <= _NEAR * part_s:
            cuts.append((max(i, 0), 0))
        elif ends[i] - at <= _NEAR * part_s:
            cuts.append((i + 1, 0))
        else:
            tokens = (math.sqrt(linear_tokens**2 + 4 * (at - begins[i])) - linear_tokens) / 2
            tokens = round(tokens / unit) * unit
            cuts.append((i + 1, 0) if tokens >= lengths[i] else (i, tokens))
    return [
        _between(lengths, begin, end)
        for begin, end in zip([(0, 0), *cuts], [*cuts, (len(lengths), 0)], strict=True)
    ]


def _between(lengths: Sequence[int], begin: tuple[int, int], end: tuple[int, int]) -> list[Piece]:
    """What lies between two cuts; a cut is a sequence and the tokens of it that lie before."""
    found = []
    for i in range(begin[0], min(end[0] + 1, len(lengths))):
        first = begin[1] if i == begin[0] else 0
        stop = end[1] if i == end[0] else lengths[i]
        if stop > first:
            found.append(Piece(i, first, stop))
    return found

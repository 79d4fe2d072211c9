"""Parts of a micro-batch: its tokens, cut in order into pieces that take equal time.

A stage of a pipeline hands on a part while it computes the next one, so that the next stage begins
after a part, not after the whole. A query of a part sees the keys of the parts before it, so the
time of a sequence's first ``x`` tokens grows like ``x^2 + linear_tokens x``: early parts are
longer. What is sharded over a ring and what lies whole on a member are cut each by itself.

On a ring keys and values of the earlier parts go around with those of a part, or they stay and its
queries go around: `queries_travel`.
"""

import itertools
import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from megatron_hdp.arrays import Float64Array
from megatron_hdp.planner.bounds import attention_s
from megatron_hdp.planner.cost_model import CostModel
from megatron_hdp.planner.flat_plan import FlatPlan

_NEAR = 1 / 8 + 1e-9  # a cut exactly so near is decided alike, however its time is rounded
"""A cut that lies nearer to a border of sequences than this share of a part goes to the border."""


AUTO = "auto"
"""A number of parts that `auto_parts` chooses."""

_AUTO_PARTS, _MOST_PARTS = 8, 1024


def auto_parts(stages: int) -> int:
    """The most parts where nobody names a number: 8 for each stage, 1 without stages.

    In so many the part that a pipeline of P stages waits for, P - 1 times, takes less than an
    eighth of the whole's time in a stage.
    """
    return min(_MOST_PARTS, _AUTO_PARTS * stages) if stages > 1 else 1


class Piece(NamedTuple):
    """Neighbouring tokens of one of the sequences that were cut."""

    sequence: int
    """Its place among them."""
    first: int
    stop: int


class PartSize(NamedTuple):
    """What a part holds of sequences that follow each other."""

    tokens: float
    earlier: float
    """Tokens that earlier parts hold of the sequence that the part begins within."""
    squares: float
    """What it adds to the squares of the sequences' lengths: pairs of query and key, twice."""


def cut_in_parts(
    lengths: Sequence[int], num_parts: int, unit: int, linear_tokens: float
) -> list[list[Piece]]:
    """What each part holds of sequences that follow each other.

    Args:
        lengths: tokens of each sequence.
        num_parts: at least 1; those that nothing is left for are empty.
        unit: sequences are cut at multiples of it, so that only the end of one needs padding.
        linear_tokens: what a token takes besides attention, in keys that it could see instead;
            infinite: all tokens take the same, and no part gets more units than the shares of all
            make up, rounded up.
    """
    if math.isinf(linear_tokens):
        return _cut_evenly(lengths, num_parts, unit)

    def in_units(i: int, tokens: float) -> tuple[int, int]:
        whole = round(tokens / unit) * unit
        return (i, whole) if whole == 0 or whole < lengths[i] else (i + 1, 0)

    cuts = [in_units(*cut) for cut in _cuts(lengths, num_parts, linear_tokens)]
    return [_between(lengths, begin, end) for begin, end in pairwise([(0, 0), *cuts])]


def part_sizes(lengths: Sequence[int], num_parts: int, linear_tokens: float) -> list[PartSize]:
    """The same by size, before cuts are rounded to units: what cost models count with."""
    tokens = [0.0, *accumulate(map(float, lengths))]
    squares = [0.0, *accumulate(float(length) * length for length in lengths)]
    cuts = [(0, 0.0), *_cuts(lengths, num_parts, linear_tokens)]
    return [
        PartSize(tokens[j] + y - (tokens[i] + x), x, squares[j] + y * y - (squares[i] + x * x))
        for (i, x), (j, y) in pairwise(cuts)
    ]


def queries_travel(tokens: float, earlier: float, query_ratio: float) -> bool:
    """Whether a part's queries go around its ring; else its keys do, with those of earlier parts.

    Args:
        tokens: of the part; all of a ring's, or those of a member.
        earlier: `PartSize.earlier`, of as many members.
        query_ratio: `CostModel.query_ratio`.
    """
    return 0 < query_ratio * tokens < tokens + earlier


def traffic_tokens(size: PartSize, query_ratio: float) -> float:
    """Tokens of which keys and values would take as many bytes as go around for a part."""
    if queries_travel(size.tokens, size.earlier, query_ratio):
        return query_ratio * size.tokens
    return size.tokens + size.earlier


def sizes_of_parts(plan: FlatPlan, m: int) -> list[PartSize]:
    """What the parts of a micro-batch hold of the sequences that its ring shards."""
    sharded = plan.sequences[plan.sequence_offsets[m] : plan.sequence_offsets[m + 1]]
    linear_tokens = math.inf if plan.is_stream[m] else plan.linear_tokens
    return part_sizes(plan.lengths[sharded].tolist(), int(plan.parts_of_each[m]), linear_tokens)


def time_shares(plan: FlatPlan) -> Float64Array:
    """Of each micro-batch's time what each of its parts takes, one micro-batch's behind another's.

    All the same; but parts of a stream have equal tokens, and take what these do in attention and
    besides.
    """
    parts = plan.parts_of_each
    shares = np.repeat(1 / parts, parts)
    begins = np.cumsum(parts) - parts
    for m in np.flatnonzero(plan.is_stream).tolist():
        sizes = sizes_of_parts(plan, m)
        if any(size.tokens for size in sizes):  # else all lies whole on its members
            shares[begins[m] : begins[m] + parts[m]] = _shares_of(sizes, plan.linear_tokens)
    return shares


def shares_of_stream(length: int, num_parts: int, linear_tokens: float) -> Float64Array:
    """What parts of equal tokens of one sequence take of its time."""
    return _shares_of(part_sizes([length], num_parts, math.inf), linear_tokens)


def _shares_of(sizes: Sequence[PartSize], linear_tokens: float) -> Float64Array:
    seen = np.array([size.squares + linear_tokens * size.tokens for size in sizes])
    shares: Float64Array = seen / seen.sum()
    return shares


def shares_of_parts(
    sizes: Sequence[PartSize], query_ratio: float
) -> tuple[list[float], list[float]]:
    """What goes around a ring for each part, of what its keys are, and the part's attention."""
    tokens, squares = sum(size.tokens for size in sizes), sum(size.squares for size in sizes)
    sent = [traffic_tokens(size, query_ratio) / tokens for size in sizes]
    return sent, [size.squares / squares for size in sizes]


def _cuts(lengths: Sequence[int], num_parts: int, linear_tokens: float) -> list[tuple[int, float]]:
    """Where each part ends: a sequence, and the tokens of it that lie before.

    The C++ planner does the same, operation by operation.
    """
    is_even = math.isinf(linear_tokens)

    def time_of(tokens: float) -> float:
        return tokens if is_even else tokens * (tokens + linear_tokens)

    ends = list(accumulate(time_of(float(length)) for length in lengths))
    part_s = ends[-1] / num_parts if ends else 0.0
    near_s = 0.0 if is_even else _NEAR * part_s
    cuts, i = [], 0
    for number in range(1, num_parts):
        at = number * part_s
        while i + 1 < len(ends) and ends[i] < at:
            i += 1
        begin = ends[i - 1] if i > 0 else 0.0
        if not ends or at - begin <= near_s:
            cuts.append((i, 0.0))
        elif ends[i] - at <= near_s:
            cuts.append((i + 1, 0.0))
        elif is_even:
            cuts.append((i, at - begin))
        else:
            root = math.sqrt(linear_tokens * linear_tokens + 4 * (at - begin))
            cuts.append((i, (root - linear_tokens) / 2))
    return [*cuts, (len(lengths), 0.0)]


def _cut_evenly(lengths: Sequence[int], num_parts: int, unit: int) -> list[list[Piece]]:
    ends = np.cumsum([-(-length // unit) for length in lengths], dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    cuts = [(0, 0)]
    for number in range(1, num_parts):
        at = -(-number * total // num_parts)
        i = int(np.searchsorted(ends, at, side="right"))
        cuts.append((i, (at - (int(ends[i - 1]) if i else 0)) * unit))
    cuts.append((len(lengths), 0))
    return [_between(lengths, begin, end) for begin, end in itertools.pairwise(cuts)]


def _between(lengths: Sequence[int], begin: tuple[int, int], end: tuple[int, int]) -> list[Piece]:
    """What lies between two cuts; a cut is a sequence and the tokens of it that lie before."""
    found = []
    for i in range(begin[0], min(end[0] + 1, len(lengths))):
        first = begin[1] if i == begin[0] else 0
        stop = end[1] if i == end[0] else lengths[i]
        if stop > first:
            found.append(Piece(i, first, stop))
    return found


def linear_tokens(longest: int, cost_model: CostModel) -> float:
    """What a token takes besides attention where a sequence is so long, in keys.

    At most 1,024 times the sequence: parts are of equal tokens there, to a thousandth.
    """
    attention = float(attention_s(np.array([longest]), cost_model)[0])
    linear = (cost_model.linear_s_per_token + cost_model.attention_b) * longest
    squares = attention - cost_model.attention_b * longest
    most = 1024.0 * longest
    return min(most, linear * longest / squares) if squares > 0 else most

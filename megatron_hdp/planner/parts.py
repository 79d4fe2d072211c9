"""Parts of a micro-batch: its tokens, cut in order into pieces that take equal time.

A stage of a pipeline hands on a part while it computes the next one, so that the next stage begins
after a part, not after the whole. A query of a part sees the keys of the parts before it, so the
time of a sequence's first ``x`` tokens grows like ``x^2 + linear_tokens x``: early parts are
longer. What is sharded over a ring and what lies whole on a member are cut each by itself.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from megatron_hdp.planner.bounds import attention_s
from megatron_hdp.planner.cost_model import CostModel
from megatron_hdp.planner.evaluation import durations_s
from megatron_hdp.planner.pipeline import Pipeline
from megatron_hdp.planner.pipeline_evaluation import pipeline_schedule
from megatron_hdp.planner.types import Plan

_NEAR = 1 / 8
"""A cut that lies nearer to a border of sequences than this share of a part goes to the border."""


_LONGER = (1 / 64, 1 / 16, 1 / 4, 1 / 2)
"""By what share of its time a micro-batch may become longer; each is tried."""


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


def in_parts(made: Plan, cost_model: CostModel, pipeline: Pipeline, most_parts: int) -> Plan:
    """The plan with its micro-batches in as many parts as make the step shortest.

    Parts cost a micro-batch time: launches, and traffic where a ring's keys go around for each
    later part. For each share of `_LONGER` a micro-batch takes as many parts, a power of two, as
    make it longer by that share at most; the share whose step is shortest wins.

    Args:
        made: whose micro-batches run whole.
        cost_model: of a rank, all stages.
        pipeline: that each rank is, with one model chunk.
        most_parts: of a micro-batch; with 1 the plan stays as it is, and with one stage.
    """
    if most_parts == 1 or pipeline.stages == 1:
        return made
    tokens = linear_tokens(made, cost_model)
    numbers = 2 ** np.arange(most_parts.bit_length())
    split = [
        replace(made, num_parts=np.full(made.num_micro_batches, number), linear_tokens=tokens)
        for number in numbers.tolist()
    ]
    seconds = np.stack([durations_s(one, cost_model, pipeline.stages) for one in split])
    best, best_s = made, pipeline_schedule(made, seconds[0], pipeline).makespan_s
    known = [np.zeros(made.num_micro_batches, dtype=np.int64)]
    for longer in _LONGER:
        # the last number of parts that is short enough, whatever a smaller one takes
        is_short = seconds <= (1 + longer) * seconds[0]
        chosen = len(numbers) - 1 - np.argmax(is_short[::-1], axis=0)
        if any(np.array_equal(chosen, one) for one in known):
            continue
        known.append(chosen)
        found = replace(made, num_parts=numbers[chosen], linear_tokens=tokens)
        taken_s = np.take_along_axis(seconds, chosen[None], axis=0)[0]
        found_s = pipeline_schedule(found, taken_s, pipeline).makespan_s
        if found_s < best_s:
            best, best_s = found, found_s
    return best


def linear_tokens(made: Plan, cost_model: CostModel) -> float:
    """What a token of the longest sequence takes besides attention, in keys."""
    longest = int(made.lengths.max())
    attention = float(attention_s(np.array([longest]), cost_model)[0])
    linear = (cost_model.linear_s_per_token + cost_model.attention_b) * longest
    squares = attention - cost_model.attention_b * longest
    return linear * longest / squares if squares > 0 else float(longest) * 1024

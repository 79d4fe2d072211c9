"""In how many parts each micro-batch of a plan runs."""

from dataclasses import replace

import numpy as np

from megatron_hdp.planner.cost_model import CostModel
from megatron_hdp.planner.evaluation import durations_s
from megatron_hdp.planner.parts import linear_tokens
from megatron_hdp.planner.pipeline import Pipeline
from megatron_hdp.planner.pipeline_evaluation import pipeline_schedule
from megatron_hdp.planner.types import Plan

_LONGER = (1 / 64, 1 / 16, 1 / 4, 1 / 2)
"""By what share of its time a micro-batch may become longer; each is tried."""


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
    tokens = linear_tokens(int(made.lengths.max()), cost_model)
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

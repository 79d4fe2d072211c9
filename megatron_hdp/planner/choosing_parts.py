"""In how many parts each micro-batch of a plan runs whose stages hold several model chunks.

The C++ planner chooses where they hold one.
"""

from dataclasses import replace

import numpy as np

from megatron_hdp.planner.evaluation import durations_s
from megatron_hdp.planner.pipeline_evaluation import pipeline_schedule
from megatron_hdp.planner.problem import Problem
from megatron_hdp.planner.types import Plan

_LONGER = (1 / 64, 1 / 16, 1 / 4, 1 / 2)
"""By what share of its time a micro-batch may become longer; each is tried."""


def in_parts(made: Plan, problem: Problem) -> tuple[Plan, float]:
    """The plan with its micro-batches in as many parts as make the step shortest, and its seconds.

    For each share of `_LONGER` a micro-batch takes as many parts, a power of two, as make it longer
    by that share at most; the share whose step is shortest wins, or the plan stays as it is.
    """
    cost_model, pipeline = problem.cost_model, problem.pipeline
    numbers = 2 ** np.arange(problem.sequence_parts.bit_length())
    tokens = problem.linear_tokens
    split = [
        replace(made, num_parts=np.full(made.num_micro_batches, number), linear_tokens=tokens)
        for number in numbers.tolist()
    ]
    seconds = np.stack([durations_s(one, cost_model, pipeline.stages) for one in split])
    best, best_s = made, pipeline_schedule(made, seconds[0], pipeline).makespan_s
    for longer in _LONGER:
        # the last number of parts that is short enough, whatever a smaller one takes
        is_short = seconds <= (1 + longer) * seconds[0]
        chosen = len(numbers) - 1 - np.argmax(is_short[::-1], axis=0)
        found = replace(made, num_parts=numbers[chosen], linear_tokens=tokens)
        taken_s = np.take_along_axis(seconds, chosen[None], axis=0)[0]
        found_s = pipeline_schedule(found, taken_s, pipeline).makespan_s
        if found_s < best_s:
            best, best_s = found, found_s
    return best, best_s

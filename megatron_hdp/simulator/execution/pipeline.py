"""When everything starts: members wait for each other, stages for what comes from their neighbours.

Without stages and lockstep a rank runs forward and backward of one micro-batch after the other; a
pipeline runs Megatron's 1F1B schedule, with model chunks the interleaved one
(`planner.pipeline_evaluation`), with messages between stages. What a message carries is computed on
one stage and needed on the next; no stage stands still while it sends. With chunks the last stage
sends to the first one, too.
"""

from typing import NamedTuple

import numpy as np

from megatron_hdp.arrays import Float64Array
from megatron_hdp.planner import Plan, replay
from megatron_hdp.planner.pipeline import Pipeline
from megatron_hdp.planner.pipeline_evaluation import longest_paths, waits_of
from megatron_hdp.simulator.execution.launches import Launches


class Schedule(NamedTuple):
    """Starts of micro-batches, then padding, on each stage; shape (rows, micro-batches).

    Rows are the stages of the first model chunk, then those of the next.
    """

    forward_start_s: Float64Array
    backward_start_s: Float64Array


class PassTimes(NamedTuple):
    """Seconds of micro-batches, then padding."""

    forward_s: Float64Array
    """On each stage of every model chunk; shape (rows, micro-batches)."""
    backward_s: Float64Array
    """Likewise."""
    message_s: Float64Array
    """Of what one stage sends to the next, or back."""


def schedule(plan: Plan, launches: Launches, times: PassTimes, pipeline: Pipeline) -> Schedule:
    """Run all launches.

    Raises:
        ValueError: the ranks wait for each other for ever.
    """
    if not launches.is_aligned:
        num = plan.num_micro_batches
        starts = np.zeros((1, launches.num))  # padding waits for nobody
        both_s = times.forward_s[0, :num] + times.backward_s[0, :num]
        starts[:, :num] = replay(plan, both_s).forward_start_s
        return Schedule(starts, starts + times.forward_s)
    lists = launches.grouped
    forward, backward, message = (launches.longest(one) for one in times)
    rows, num = forward.shape
    waits = waits_of(lists, num, pipeline)
    lag_s = np.where(waits.is_message, message[waits.then % num], 0.0)
    seconds = np.stack([forward, backward], axis=1).ravel()
    starts, finished = longest_paths(waits, seconds, lag_s)
    if not finished.all():
        raise ValueError(
            f"{plan.strategy} cannot run on {pipeline.stages} pipeline stages: micro-batches wait "
            "for each other for ever; expected each at one position in the lists of its ranks"
        )
    shaped = starts.reshape(rows, 2, num)[:, :, launches.group_of]
    return Schedule(shaped[:, 0].copy(), shaped[:, 1].copy())

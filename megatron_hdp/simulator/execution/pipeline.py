"""When everything starts: members wait for each other, stages for what comes from their neighbours.

Without stages and lockstep a rank runs forward and backward of one micro-batch after the other; a
pipeline runs Megatron's 1F1B schedule, with model chunks the interleaved one
(`planner.pipeline_evaluation`), with messages between stages. What a message carries is computed on
one stage and needed on the next; no stage stands still while it sends. With chunks the last stage
sends to the first one, too.
"""

from typing import NamedTuple

import numpy as np

from megatron_hdp.arrays import Float64Array, Int64Array
from megatron_hdp.planner import Plan, replay
from megatron_hdp.planner.parts import shares_of_stream, time_shares
from megatron_hdp.planner.pipeline import Pipeline
from megatron_hdp.planner.pipeline_evaluation import (
    longest_paths,
    waits_of,
    waits_of_parts,
)
from megatron_hdp.simulator.execution.launches import Launches


class Schedule(NamedTuple):
    """Starts of micro-batches, then padding, on each stage; shape (rows, micro-batches).

    Rows are the stages of the first model chunk, then those of the next.
    """

    forward_start_s: Float64Array
    backward_start_s: Float64Array
    forward_end_s: Float64Array
    backward_end_s: Float64Array
    part_starts_s: tuple[Float64Array, Float64Array] | None = None
    """Where micro-batches run in parts: of all parts of micro-batches and padding."""


class PassTimes(NamedTuple):
    """Seconds of micro-batches, then padding."""

    forward_s: Float64Array
    """On each stage of every model chunk; shape (rows, micro-batches)."""
    backward_s: Float64Array
    """Likewise."""
    message_s: Float64Array
    """Of what one stage sends to the next, or back, at a time: in parts of one part."""


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
        forward_end_s = starts + times.forward_s
        return Schedule(starts, forward_end_s, forward_end_s, forward_end_s + times.backward_s)
    lists, group_of = launches.grouped, launches.group_of
    passes = np.stack([launches.longest(one) for one in (times.forward_s, times.backward_s)], 1)
    message, num = launches.longest(times.message_s), passes.shape[-1]
    parts, first, shares = parts_of_launches(plan, launches)
    waits = waits_of(lists, num, pipeline)
    if plan.num_parts is not None:
        waits = waits_of_parts(lists, parts, pipeline)
        passes, message = shares * np.repeat(passes, parts, axis=-1), np.repeat(message, parts)
    lag_s = np.where(waits.is_message, message[waits.then % len(message)], 0.0)
    starts, finished = longest_paths(waits, passes.ravel(), lag_s)
    if not finished.all():
        raise ValueError(
            f"{plan.strategy} cannot run on {pipeline.stages} pipeline stages: micro-batches wait "
            "for each other for ever; expected each at one position in the lists of its ranks"
        )
    begin_s = starts.reshape(passes.shape)
    ends = begin_s + passes
    last = first + parts - 1  # backward begins with the last part
    part_starts_s = None
    if plan.num_parts is not None:
        each = parts[group_of]
        skipped = first[group_of] - (np.cumsum(each) - each)
        these = np.arange(int(each.sum())) + np.repeat(skipped, each)
        part_starts_s = begin_s[:, 0, these], begin_s[:, 1, these]
    return Schedule(
        forward_start_s=begin_s[:, 0, first[group_of]],
        backward_start_s=begin_s[:, 1, last[group_of]],
        forward_end_s=ends[:, 0, last[group_of]],
        backward_end_s=ends[:, 1, first[group_of]],
        part_starts_s=part_starts_s,
    )


class LaunchParts(NamedTuple):
    """In how many parts launches run: one's parts behind another's."""

    parts: Int64Array
    """Of each launch: those of the micro-batch that has most."""
    first: Int64Array
    """Of each launch, in `shares`."""
    shares: Float64Array
    """Of a launch's time what each of its parts takes: where streams run, as of the longest."""


def parts_of_launches(plan: Plan, launches: Launches) -> LaunchParts:
    """Cut what starts and ends together."""
    of_plan = launches.group_of[: plan.num_micro_batches]
    parts = np.ones(int(launches.group_of.max(initial=-1)) + 1, dtype=np.int64)
    np.maximum.at(parts, of_plan, plan.parts_of_each)
    first = np.cumsum(parts) - parts
    shares = np.repeat(1 / parts, parts)
    own, ends, longest = time_shares(plan), np.cumsum(plan.parts_of_each), np.zeros(len(parts))
    for m in np.flatnonzero(plan.is_stream).tolist():
        group, count = int(of_plan[m]), int(plan.parts_of_each[m])
        length = int(plan.lengths[plan.sequences[plan.sequence_offsets[m]]])
        if length <= longest[group]:
            continue
        longest[group] = length
        mine = slice(first[group], first[group] + parts[group])
        if count == parts[group]:
            shares[mine] = own[ends[m] - count : ends[m]]
        else:
            shares[mine] = shares_of_stream(length, int(parts[group]), plan.linear_tokens)
    return LaunchParts(parts, first, shares)

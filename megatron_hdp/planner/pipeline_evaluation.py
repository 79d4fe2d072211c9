"""The exact 1F1B schedule of a plan whose HDP ranks are pipelines of several stages.

Every operation, the forward or the backward of a micro-batch on a stage, starts when the one before
it has ended on that stage of every member, and when the stage that feeds it has. With k
micro-batches on a rank and w = P - 1 - stage, its stage runs forward i before backward j exactly
when i <= j + w: min(k, w) forwards, then pairs, then the remaining backwards.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_hdp.planner.types import Plan

Float64Array = NDArray[np.float64]
Int64Array = NDArray[np.int64]


class PipelineSchedule(NamedTuple):
    """When each micro-batch starts on each stage; shape (stages, micro-batches)."""

    forward_start_s: Float64Array
    backward_start_s: Float64Array
    makespan_s: float


def pipeline_schedule(plan: Plan, duration_s: Float64Array, stages: int) -> PipelineSchedule:
    """Runs the plan; ``duration_s`` is a micro-batch's time over all stages, both passes.

    Raises:
        ValueError: the ranks wait for each other for ever; names the micro-batches.
    """
    num_micro_batches = plan.num_micro_batches
    # operation (stage, pass, micro-batch), passes being forward and backward
    seconds = np.multiply.outer(np.array([1.0, 2.0]), duration_s / (3 * stages)).ravel()
    seconds = np.tile(seconds, stages)
    first, then = _waits(plan, stages)
    starts, finished = _longest_paths(first, then, seconds)
    if not finished.all():
        raise ValueError(_deadlock(plan, stages, first, then, finished))
    shaped = starts.reshape(stages, 2, num_micro_batches)
    makespan_s = float((starts + seconds).max()) if num_micro_batches else 0.0
    return PipelineSchedule(shaped[:, 0].copy(), shaped[:, 1].copy(), makespan_s)


def _waits(plan: Plan, stages: int) -> tuple[Int64Array, Int64Array]:
    """Pairs of operations of which the second waits for the first."""
    num = plan.num_micro_batches
    by_rank = np.argsort(plan.ranks, kind="stable")
    micro_batches = np.repeat(np.arange(num), np.diff(plan.rank_offsets))[by_rank]
    counts = np.bincount(plan.ranks, minlength=plan.num_ranks)
    count = np.repeat(counts, counts)
    begin = np.repeat(np.cumsum(counts) - counts, counts)
    position = np.arange(len(count)) - begin
    same_rank = np.repeat(plan.ranks[by_rank], 2)
    same_rank = same_rank[1:] == same_rank[:-1]
    first, then = [], []
    for stage in range(stages):
        warm_up = stages - 1 - stage
        forward, backward = 2 * stage * num, (2 * stage + 1) * num
        order = np.empty(2 * len(count), dtype=np.int64)
        behind = np.maximum(0, position - warm_up)  # backwards before forward i
        order[2 * begin + position + behind] = forward + micro_batches
        ahead = np.minimum(count, position + warm_up + 1)  # forwards before backward j
        order[2 * begin + position + ahead] = backward + micro_batches
        first.append(order[:-1][same_rank])
        then.append(order[1:][same_rank])
        all_of_them = np.arange(num)
        if stage + 1 < stages:
            first += [forward + all_of_them, backward + 2 * num + all_of_them]
            then += [forward + 2 * num + all_of_them, backward + all_of_them]
        else:
            first.append(forward + all_of_them)
            then.append(backward + all_of_them)
    return np.concatenate(first), np.concatenate(then)


def _longest_paths(
    first: Int64Array, then: Int64Array, seconds: Float64Array
) -> tuple[Float64Array, NDArray[np.bool_]]:
    """Earliest start of every operation, and which of them ever start: topological, in waves."""
    num = len(seconds)
    by_first = np.argsort(first, kind="stable")
    then = then[by_first]
    offsets = np.concatenate([[0], np.cumsum(np.bincount(first, minlength=num))])
    waiting_for = np.bincount(then, minlength=num)
    starts = np.zeros(num)
    finished = np.zeros(num, dtype=np.bool_)
    wave = np.flatnonzero(waiting_for == 0)
    while wave.size:
        finished[wave] = True
        fan_out = offsets[wave + 1] - offsets[wave]
        ends = np.repeat(starts[wave] + seconds[wave], fan_out)
        skipped = np.repeat(offsets[wave] - (np.cumsum(fan_out) - fan_out), fan_out)
        next_ones = then[skipped + np.arange(len(ends))]
        np.maximum.at(starts, next_ones, ends)
        np.subtract.at(waiting_for, next_ones, 1)
        touched = np.unique(next_ones)
        wave = touched[waiting_for[touched] == 0]
    return starts, finished


def _deadlock(
    plan: Plan, stages: int, first: Int64Array, then: Int64Array, finished: NDArray[np.bool_]
) -> str:
    """Follows what waits for what until it comes back to where it was."""
    stuck = ~finished[first]
    cause = dict(zip(then[stuck].tolist(), first[stuck].tolist(), strict=True))
    chain = [next(iter(cause))]
    while cause[chain[-1]] not in chain:
        chain.append(cause[chain[-1]])
    cycle = chain[chain.index(cause[chain[-1]]) :]
    culprits = sorted({operation % plan.num_micro_batches for operation in cycle})
    named = ", ".join(f"{m} (ranks {list(plan.micro_batch(m).ranks)})" for m in culprits)
    return (
        f"deadlock with {stages} pipeline stages: micro-batches {named} wait for each other; a "
        "micro-batch must stand at the same position in the list of every rank that shares it: "
        f"check the plan with validate(pipeline_stages={stages})"
    )

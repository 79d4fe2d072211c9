"""The exact 1F1B schedule of a plan whose HDP ranks are pipelines of several stages.

Every operation, the forward or the backward of a micro-batch on a stage, starts when the one before
it has ended on that stage of every member, and when the stage that feeds it has. With k
micro-batches on a rank and w = P - 1 - stage, its stage runs forward i before backward j exactly
when i <= j + w: min(k, w) forwards, then pairs, then the remaining backwards.

With V model chunks on a stage (the interleaved schedule) micro-batches pass in groups of P through
one chunk after the other, backward from the last to the first; i and j count passes through a
chunk, and w = 2 (P - 1 - stage) + (V - 1) P. Chunk c of a stage is row c P + stage; each row takes
its share of a micro-batch's time.
"""

from typing import NamedTuple

import numpy as np

from megatron_hdp.arrays import BoolArray, Float64Array, Int64Array
from megatron_hdp.planner.lockstep import PADDING, slots
from megatron_hdp.planner.parts import time_shares
from megatron_hdp.planner.pipeline import Pipeline
from megatron_hdp.planner.types import Plan


class PipelineSchedule(NamedTuple):
    """When each micro-batch starts on each stage; shape (chunks x stages, micro-batches)."""

    forward_start_s: Float64Array
    backward_start_s: Float64Array
    makespan_s: float
    part_starts_s: tuple[Float64Array, Float64Array] | None = None
    """Forwards and backwards by parts, ``[chunks x stages, parts]``; None: all run whole."""


class RankLists(NamedTuple):
    """What each rank runs, in order: the lists of all ranks, one behind the other."""

    micro_batches: Int64Array
    counts: Int64Array
    """Entries of each rank."""


class Waits(NamedTuple):
    """Pairs of operations of which the second waits for the first.

    Operation (row, pass, micro-batch) of n micro-batches has number ``(2 row + pass) n +
    micro-batch``, passes being forward (0) and backward (1), rows stages, of every chunk.
    """

    first: Int64Array
    then: Int64Array
    is_message: BoolArray
    """Whether the second takes from another stage what the first has made."""


def pipeline_schedule(
    plan: Plan,
    duration_s: Float64Array,
    pipeline: Pipeline,
    earliest_s: Float64Array | None = None,
) -> PipelineSchedule:
    """Runs the plan; ``duration_s`` is a micro-batch's time over all stages, both passes.

    With several model chunks it runs in its slots (`planner.lockstep`), whose padding takes no
    time. No forward starts before its ``earliest_s``, ``[chunks x stages, micro-batches]``.

    Raises:
        ValueError: the ranks wait for each other for ever; names the micro-batches.
    """
    if plan.num_parts is not None:
        return _schedule_in_parts(plan, duration_s, pipeline, earliest_s)
    num_micro_batches = plan.num_micro_batches
    lists = lists_of(plan) if pipeline.chunks == 1 else _lists_of_slots(plan, pipeline)
    num = max(num_micro_batches, int(lists.micro_batches.max(initial=-1)) + 1)
    padded_s = np.zeros(num)
    padded_s[:num_micro_batches] = duration_s
    passes = (pass_shares(plan, num) * padded_s).ravel()
    seconds = np.multiply.outer(pipeline.row_weights, passes).ravel()
    waits = waits_of(lists, num, pipeline)
    earliest = np.zeros((pipeline.rows, 2, num))
    if earliest_s is not None:
        earliest[:, 0, :num_micro_batches] = earliest_s
    starts, finished = longest_paths(waits, seconds, earliest_s=earliest.ravel())
    if not finished.all():
        raise ValueError(_deadlock(plan, pipeline.stages, waits.first, waits.then, finished))
    shaped = starts.reshape(pipeline.rows, 2, num)[:, :, :num_micro_batches]
    makespan_s = float((starts + seconds).max()) if num_micro_batches else 0.0
    return PipelineSchedule(shaped[:, 0].copy(), shaped[:, 1].copy(), makespan_s)


def pass_shares(plan: Plan, num: int) -> Float64Array:
    """Of each micro-batch's time the parts that are forward and backward, ``[2, num]``.

    From those of the plan on they are padding.
    """
    shares = np.repeat([[1 / 3], [2 / 3]], num, axis=1)
    shares[:, : plan.num_micro_batches][:, plan.runs_twice] = [[1 / 4], [3 / 4]]
    return shares


def _schedule_in_parts(
    plan: Plan, duration_s: Float64Array, pipeline: Pipeline, earliest_s: Float64Array | None
) -> PipelineSchedule:
    """The same of micro-batches in parts, that pass from stage to stage one by one."""
    lists = lists_of(plan) if pipeline.chunks == 1 else _lists_of_slots(plan, pipeline)
    num_padding = max(0, int(lists.micro_batches.max(initial=-1)) + 1 - plan.num_micro_batches)
    parts = np.append(plan.parts_of_each, np.ones(num_padding, dtype=np.int64))
    padded_s = np.append(duration_s, np.zeros(num_padding))
    num, begins = int(parts.sum()), np.cumsum(parts) - parts
    shares = np.repeat(pass_shares(plan, len(parts)), parts, axis=1)
    shares *= np.append(time_shares(plan), np.ones(num_padding))
    passes = shares * np.repeat(padded_s, parts)
    seconds = np.multiply.outer(pipeline.row_weights, passes.ravel()).ravel()
    waits = waits_of_parts(lists, parts, pipeline)
    earliest = np.zeros((pipeline.rows, 2, num))
    of_plan = slice(0, int(plan.parts_of_each.sum()))
    if earliest_s is not None:
        earliest[:, 0, of_plan] = np.repeat(earliest_s, plan.parts_of_each, axis=1)
    starts, finished = longest_paths(waits, seconds, earliest_s=earliest.ravel())
    if not finished.all():
        raise ValueError(f"deadlock with {pipeline.stages} pipeline stages")
    shaped = starts.reshape(pipeline.rows, 2, num)
    makespan_s = float((starts + seconds).max()) if num else 0.0
    begins, ends = (one[: plan.num_micro_batches] for one in (begins, begins + parts - 1))
    # backward begins with the last part
    part_starts_s = shaped[:, 0, of_plan].copy(), shaped[:, 1, of_plan].copy()
    return PipelineSchedule(
        part_starts_s[0][:, begins], part_starts_s[1][:, ends], makespan_s, part_starts_s
    )


def waits_of_parts(lists: RankLists, parts: Int64Array, pipeline: Pipeline) -> Waits:
    """What waits for what when micro-batches run in so many parts each, as of `waits_of`.

    Numbers are those of parts instead of micro-batches. A stage runs the parts of a forward in
    order and those of a backward in reverse; each waits for the same part on the stage that feeds
    it.
    """
    begins, num, num_whole = np.cumsum(parts) - parts, int(parts.sum()), len(parts)
    ranks = np.repeat(np.arange(len(lists.counts)), 2 * pipeline.chunks * lists.counts)
    all_of_them, last = np.arange(num), begins + parts - 1
    first, then, is_message = [], [], []
    for stage in range(pipeline.stages):
        order = order_on_stage(lists, num_whole, pipeline, stage)
        chunk, operation = np.divmod(order, 2 * num_whole * pipeline.stages)
        whole, goes_back = operation % num_whole, operation >= num_whole
        counts = parts[whole]
        place = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        chunk, whole = np.repeat(chunk, counts), np.repeat(whole, counts)
        goes_back = np.repeat(goes_back, counts)
        numbers = np.where(goes_back, num + last[whole] - place, begins[whole] + place)
        of_rank = np.repeat(ranks, counts)
        same_rank = of_rank[1:] == of_rank[:-1]
        numbers += 2 * (chunk * pipeline.stages + stage) * num
        first.append(numbers[:-1][same_rank])
        then.append(numbers[1:][same_rank])
        is_message.append(np.zeros(len(first[-1]), dtype=np.bool_))
    for row in range(pipeline.rows):
        forward, backward = 2 * row * num, (2 * row + 1) * num
        if row + 1 < pipeline.rows:
            first += [forward + all_of_them, backward + 2 * num + all_of_them]
            then += [forward + 2 * num + all_of_them, backward + all_of_them]
            is_message.append(np.ones(2 * num, dtype=np.bool_))
        else:
            first.append(forward + last)
            then.append(backward + last)
            is_message.append(np.zeros(num_whole, dtype=np.bool_))
    return Waits(np.concatenate(first), np.concatenate(then), np.concatenate(is_message))


def lists_of(plan: Plan) -> RankLists:
    """Each rank's micro-batches in the plan's order."""
    by_rank = np.argsort(plan.ranks, kind="stable")
    owners = np.repeat(np.arange(plan.num_micro_batches), np.diff(plan.rank_offsets))
    counts = np.bincount(plan.ranks, minlength=plan.num_ranks)
    return RankLists(owners[by_rank], counts)


def _lists_of_slots(plan: Plan, pipeline: Pipeline) -> RankLists:
    """Each rank's slots; numbers from the plan's micro-batches on are padding."""
    of_ranks = slots(plan, aligned=True, group_size=pipeline.group_size)
    flat = np.concatenate(of_ranks)
    is_padding = flat == PADDING
    flat[is_padding] = plan.num_micro_batches + np.arange(int(is_padding.sum()))
    return RankLists(flat, np.array([len(one) for one in of_ranks], dtype=np.int64))


def order_on_stage(lists: RankLists, num: int, pipeline: Pipeline, stage: int) -> Int64Array:
    """Every rank's forwards ``m`` and backwards ``num + m`` in the order in which it runs them.

    Those through chunk ``c`` are ``2 num stages c`` more.

    Returns:
        Twice as many entries a chunk as the lists have, the first rank's first.
    """
    chunks = pipeline.chunks
    count = chunks * np.repeat(lists.counts, lists.counts)
    begin = np.repeat(np.cumsum(lists.counts) - lists.counts, lists.counts)
    position = np.arange(len(count)) - begin
    begin = chunks * begin
    warm_up, group = pipeline.warm_up(stage), pipeline.group_size
    order = np.empty(2 * chunks * len(count), dtype=np.int64)
    for chunk in range(chunks):
        numbers = 2 * num * pipeline.stages * chunk + lists.micro_batches
        i = _pass(position, chunk, chunks, group)
        behind = np.maximum(0, i - warm_up)  # backwards before forward i
        order[2 * begin + i + behind] = numbers
        j = _pass(position, chunks - 1 - chunk, chunks, group)
        ahead = np.minimum(count, j + warm_up + 1)  # forwards before backward j
        order[2 * begin + j + ahead] = num + numbers
    return order


def _pass(position: Int64Array, turn: int, chunks: int, group: int) -> Int64Array:
    """Passes through a chunk before that of the micro-batch at a position, in its group's turn."""
    before: Int64Array = position // group * group
    return before * chunks + turn * group + position - before


def waits_of(lists: RankLists, num: int, pipeline: Pipeline) -> Waits:
    """What waits for what when ``num`` micro-batches run on such pipelines."""
    ranks = np.repeat(np.arange(len(lists.counts)), 2 * pipeline.chunks * lists.counts)
    same_rank = ranks[1:] == ranks[:-1]
    all_of_them = np.arange(num)
    first, then, is_message = [], [], []
    for stage in range(pipeline.stages):
        order = 2 * stage * num + order_on_stage(lists, num, pipeline, stage)
        first.append(order[:-1][same_rank])
        then.append(order[1:][same_rank])
        is_message.append(np.zeros(len(first[-1]), dtype=np.bool_))
        for row in range(stage, pipeline.rows, pipeline.stages):
            forward, backward = 2 * row * num, (2 * row + 1) * num
            sends_on = row + 1 < pipeline.rows
            if sends_on:
                first += [forward + all_of_them, backward + 2 * num + all_of_them]
                then += [forward + 2 * num + all_of_them, backward + all_of_them]
            else:
                first.append(forward + all_of_them)
                then.append(backward + all_of_them)
            is_message.append(np.full(2 * num if sends_on else num, sends_on))
    return Waits(np.concatenate(first), np.concatenate(then), np.concatenate(is_message))


def longest_paths(
    waits: Waits,
    seconds: Float64Array,
    lag_s: Float64Array | None = None,
    earliest_s: Float64Array | None = None,
) -> tuple[Float64Array, BoolArray]:
    """Earliest start of every operation, and which of them ever start: topological, in waves.

    A ``lag_s`` lies between the end of the first of a pair and the start of the second; none
    starts before its ``earliest_s``.
    """
    num = len(seconds)
    by_first = np.argsort(waits.first, kind="stable")
    then = waits.then[by_first]
    lag = None if lag_s is None else lag_s[by_first]
    offsets = np.concatenate([[0], np.cumsum(np.bincount(waits.first, minlength=num))])
    waiting_for = np.bincount(then, minlength=num)
    starts = np.zeros(num) if earliest_s is None else earliest_s.copy()
    finished = np.zeros(num, dtype=np.bool_)
    wave = np.flatnonzero(waiting_for == 0)
    while wave.size:
        finished[wave] = True
        fan_out = offsets[wave + 1] - offsets[wave]
        ends = np.repeat(starts[wave] + seconds[wave], fan_out)
        skipped = np.repeat(offsets[wave] - (np.cumsum(fan_out) - fan_out), fan_out)
        pairs = skipped + np.arange(len(ends))
        next_ones = then[pairs]
        np.maximum.at(starts, next_ones, ends if lag is None else ends + lag[pairs])
        np.subtract.at(waiting_for, next_ones, 1)
        touched = np.unique(next_ones)
        wave = touched[waiting_for[touched] == 0]
    return starts, finished


def _deadlock(
    plan: Plan, stages: int, first: Int64Array, then: Int64Array, finished: BoolArray
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

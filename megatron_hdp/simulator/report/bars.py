"""What ranks do when, of an executed step: bars of a few ranks, and how many of all compute."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from megatron_hdp.arrays import AnyArray, BoolArray, Float64Array, Int64Array
from megatron_hdp.simulator.execution import StepExecution
from megatron_hdp.simulator.plan_bars import Lanes, in_parts, joined_bars
from megatron_hdp.simulator.report.figures import parts_of

MAX_ROWS = 24
"""Of one strategy; with stages, at least four ranks have a row a stage."""
MAX_BARS = 4000
"""Of one strategy; where there are more, short ones of one degree are joined."""
_CELLS = 2000  # of a step, one of which a bar takes at least that stands by itself
_WIDE = 0.01  # of a step: a cell in which colours no longer count
_BEHIND = ("gradient sync", "optimizer", "parameter gather", "loading")


@dataclass(frozen=True, eq=False, kw_only=True)
class Gantt:
    """Rows of bars of one step: of chosen ranks, with stages a row a stage."""

    ranks: tuple[int, ...]
    num_ranks: int
    stages: int
    chunks: int
    """Of the model on each stage (virtual stages)."""
    row: Int64Array
    start_s: Float64Array
    busy_s: Float64Array
    """Own work; where bars are joined, of all of them."""
    end_s: Float64Array
    micro_batch: Int64Array
    """The first of those that are joined."""
    degree: Int64Array
    tokens: Float64Array
    """Of the member; where bars are joined, of all of them."""
    joined: Int64Array
    """Bars in this one."""
    backward: BoolArray
    chunk: Int64Array
    """The model chunk that it runs through, likewise the first one's."""
    behind: tuple[tuple[str, float, float], ...]
    """Parts of the step behind the last backward: name, start, seconds."""
    makespan_s: float
    step_s: float

    @property
    def num_joined(self) -> int:
        """Bars that are drawn together with others."""
        return int(self.joined[self.joined > 1].sum())


def lanes_of(execution: StepExecution, stage: int) -> Lanes:
    """Own work of all ranks on a stage; it begins with its micro-batch.

    Forward and backward are one bar where one follows the other at once.
    """
    plan, times, pipeline = execution.plan, execution.times, execution.pipeline
    num = plan.num_micro_batches
    degrees = np.diff(plan.rank_offsets)
    member_of = np.repeat(np.arange(num), degrees)
    both_s = times.forward_s.sum(axis=0) + times.backward_s.sum(axis=0)
    shares = [
        np.divide(seconds, both_s, out=np.zeros_like(seconds), where=both_s > 0)
        for seconds in (times.forward_s, times.backward_s)
    ]
    starts = execution.forward_start_s[:, :num], execution.backward_start_s[:, :num]
    if _is_at_once(execution):
        passes = [(starts[0][0], shares[0][0] + shares[1][0], False, 0)]
    else:
        passes = [
            (starts[backward][row], shares[backward][row], bool(backward), row // pipeline.stages)
            for backward in (0, 1)
            for row in range(stage, pipeline.rows, pipeline.stages)
        ]
    bars = []
    for start, share, backward, chunk in passes:
        start_s = start[member_of]
        end_s = start_s + times.own_s * share[member_of]
        one = Lanes(
            rank=plan.ranks.astype(np.int64),
            micro_batch=member_of,
            degree=degrees[member_of],
            start_s=start_s,
            ring_end_s=end_s,
            own_end_s=end_s,
            backward=np.full(len(member_of), backward),
            chunk=np.full(len(member_of), chunk),
            member=np.arange(len(member_of)),
            part=np.zeros(len(member_of), dtype=np.int64),
        )
        if execution.part_starts_s is not None:
            row = chunk * pipeline.stages + stage
            one = in_parts(one, execution.part_starts_s[backward][row], plan)
        bars.append(one)
    return joined_bars(bars)


def _is_at_once(execution: StepExecution) -> bool:
    """Whether the backward of a micro-batch follows its forward at once."""
    if execution.pipeline.stages > 1:
        return False
    num, forward_s = execution.plan.num_micro_batches, execution.times.forward_s[0]
    ends_s = execution.forward_start_s[0, :num] + forward_s
    return np.allclose(execution.backward_start_s[0, :num], ends_s, atol=0.0)


def chosen_ranks(execution: StepExecution, always: Iterable[int]) -> tuple[int, ...]:
    """Ranks that have rows: all, or some evenly spaced, the busiest, the idlest, and ``always``."""
    num, most = execution.plan.num_ranks, max(4, MAX_ROWS // execution.pipeline.stages)
    if num <= most:
        return tuple(range(num))
    wanted = [int(execution.busy_s.argmax()), int(execution.busy_s.argmin())]
    wanted += sorted(always)[: most // 4]
    spaced = np.linspace(0, num - 1, most - len(set(wanted))).round().astype(int).tolist()
    return tuple(sorted({*wanted, *spaced}))


def gantt_of(execution: StepExecution, always: Iterable[int] = ()) -> Gantt:
    """Lay out a step; some ranks, a few, are shown always."""
    ranks, stages = chosen_ranks(execution, always), execution.pipeline.stages
    place = np.full(execution.plan.num_ranks, -1)
    place[list(ranks)] = np.arange(len(ranks))
    found: dict[str, list[AnyArray]] = {}
    for stage in range(stages):
        lanes = lanes_of(execution, stage)
        mine = np.flatnonzero(place[lanes.rank] >= 0)
        parts = execution.plan.parts_of_each[lanes.micro_batch[mine]]
        tokens = execution.times.tokens[lanes.member[mine]] / parts
        for name, values in {
            "row": place[lanes.rank[mine]] * stages + stage,
            "start_s": lanes.start_s[mine],
            "end_s": lanes.own_end_s[mine],
            "micro_batch": lanes.micro_batch[mine],
            "degree": lanes.degree[mine],
            "tokens": tokens,
            "backward": lanes.backward[mine],
            "chunk": lanes.chunk[mine],
        }.items():
            found.setdefault(name, []).append(values)
    bars = {name: np.concatenate(values) for name, values in found.items()}
    order = np.lexsort((bars["start_s"], bars["row"]))
    bars = {name: values[order] for name, values in bars.items()}
    bars["busy_s"] = bars["end_s"] - bars["start_s"]
    bars["joined"] = np.ones(len(order), dtype=np.int64)
    if len(order) > MAX_BARS:
        bars = _joined(bars, execution.step_s / _CELLS)
    return Gantt(
        ranks=ranks,
        num_ranks=execution.plan.num_ranks,
        stages=stages,
        chunks=execution.pipeline.chunks,
        behind=_behind(execution),
        makespan_s=execution.makespan_s,
        step_s=execution.step_s,
        **bars,
    )


def _joined(bars: dict[str, AnyArray], cell_s: float) -> dict[str, AnyArray]:
    """Join short neighbours of one row, degree and pass that begin in one cell of time.

    Cells grow until no more than `MAX_BARS` are left; where that takes wide ones, neighbours need
    not be alike, and the first one's colour stands for all.
    """
    widest_s = bars["end_s"].max()
    while True:
        cell = np.floor(bars["start_s"] / cell_s)
        short = bars["busy_s"] < cell_s
        alike = short[1:] & short[:-1] & (cell[1:] == cell[:-1])
        names = ("row", "degree", "backward") if cell_s < _WIDE * widest_s else ("row",)
        for name in names:
            alike &= bars[name][1:] == bars[name][:-1]
        begins = np.flatnonzero(np.concatenate([[True], ~alike]))
        if len(begins) <= MAX_BARS or cell_s > widest_s:
            break
        cell_s *= 2
    added = ("busy_s", "tokens", "joined")
    found: dict[str, AnyArray] = {
        name: np.add.reduceat(values, begins) if name in added else values[begins]
        for name, values in bars.items()
    }
    found["end_s"] = np.maximum.reduceat(bars["end_s"], begins)
    return found


def _behind(execution: StepExecution) -> tuple[tuple[str, float, float], ...]:
    parts, at, found = parts_of(execution.record), execution.makespan_s, []
    for name in _BEHIND:
        if parts[name] > 0:
            found.append((name, at, parts[name]))
        at += parts[name]
    return tuple(found)


def computing_share(execution: StepExecution, edges_s: Float64Array) -> Float64Array:
    """Share of ranks and stages that work, mean between each edge and the next; edges rise."""
    worked = np.zeros(len(edges_s))
    for stage in range(execution.pipeline.stages):
        lanes = lanes_of(execution, stage)
        worked += _since(lanes.start_s, edges_s) - _since(lanes.own_end_s, edges_s)
    lanes_there = execution.plan.num_ranks * execution.pipeline.stages
    share: Float64Array = np.diff(worked) / np.diff(edges_s) / lanes_there
    return share


def _since(times_s: Float64Array, edges_s: Float64Array) -> Float64Array:
    """Seconds from each of these times to an edge behind it, summed, for every edge."""
    ordered = np.sort(times_s)
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    before = np.searchsorted(ordered, edges_s, side="right")
    seconds: Float64Array = before * edges_s - sums[before]
    return seconds

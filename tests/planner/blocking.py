"""Ranks run with blocking semantics: each knows only what it waits for.

A worker is a stage of a rank, with one model chunk or several. It runs its own list, forwards and
backwards in the order of 1F1B. In its next operation it waits for its ring and for all ranks that
share experts with it, so that nobody of them gets ahead of another one's position.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from megatron_hdp.planner.lockstep import PADDING
from megatron_hdp.planner.pipeline import Pipeline

Operation = tuple[str, int, int]  # "F" or "B", position, chunk
Cell = tuple[int, int]  # rank, position


class Ran(NamedTuple):
    """An operation that has ended."""

    start_s: float
    end_s: float


def one_forward_one_backward(micro_batches: list[int], stage: int, stages: int) -> list[Operation]:
    """Pass, micro-batch and chunk of each operation of a stage."""
    forwards, backwards = ([(kind, m, 0) for m in micro_batches] for kind in "FB")
    return _in_turn(forwards, backwards, stages - 1 - stage)


def interleaved(
    micro_batches: list[int], stage: int, stages: int, chunks: int, group: int
) -> list[Operation]:
    """The same with several chunks, in Megatron's order: a group through every one, then the next.

    Forward from the first chunk to the last, backward from the last to the first.
    """
    table = [
        (m, chunk)
        for begin in range(0, len(micro_batches), group)
        for chunk in range(chunks)
        for m in micro_batches[begin : begin + group]
    ]
    forwards = [("F", m, chunk) for m, chunk in table]
    backwards = [("B", m, chunks - 1 - chunk) for m, chunk in table]
    return _in_turn(forwards, backwards, 2 * (stages - 1 - stage) + (chunks - 1) * group)


def _in_turn(
    forwards: list[Operation], backwards: list[Operation], warm_up: int
) -> list[Operation]:
    warm_up = min(len(forwards), warm_up)
    pairs = zip(forwards[warm_up:], backwards, strict=False)
    steady = [operation for pair in pairs for operation in pair]
    return forwards[:warm_up] + steady + backwards[len(forwards) - warm_up :]


def fed_by(kind: str, m: int, at: int, last: int) -> tuple[str, int, int] | None:
    """What must have ended: passes run through the rows of all chunks, one behind another."""
    if kind == "F":
        return ("F", m, at - 1) if at else None
    return ("B", m, at + 1) if at < last else ("F", m, at)


def company(lists: Sequence[Sequence[int]], size: int) -> dict[Cell, set[Cell]]:
    """Of a rank at a position, the ranks and positions that it waits for: rings and domains."""
    ties: dict[tuple[object, ...], set[Cell]] = {}
    for rank, one in enumerate(lists):
        for place, m in enumerate(one):
            ties.setdefault(("domain", rank // size, place), set()).add((rank, place))
            if m != PADDING:
                ties.setdefault(("ring", m), set()).add((rank, place))
    found = {cell: {cell} for tie in ties.values() for cell in tie}
    for tie in ties.values():
        whole = set().union(*(found[cell] for cell in tie))
        found |= dict.fromkeys(whole, whole)
    return found


def run_blocking(
    lists: Sequence[Sequence[int] | np.ndarray],
    pipeline: Pipeline,
    *,
    size: int = 1,
    seconds: Mapping[tuple[int, int], float] | None = None,
    group: int | None = None,
) -> dict[tuple[int, str, int, int], Ran] | None:
    """Every operation by rank, pass, position and row; None: ranks wait for each other for ever.

    Args:
        lists: micro-batches that each rank runs, by position, or `PADDING`.
        pipeline: that each rank is.
        size: ranks of a domain, which share experts.
        seconds: by domain and position, all stages; what is missing takes no time.
        group: positions that pass a chunk before the next; lists are taken as they are then, else
            padded to whole groups.
    """
    stages, chunks, seconds = pipeline.stages, pipeline.chunks, seconds or {}
    queues = [[int(m) for m in one] for one in lists]
    if group is None:
        group = pipeline.group_size
        queues = [one + [PADDING] * (-len(one) % group) for one in queues]
    together = company(queues, size)
    waiting = {
        (rank, stage): interleaved(list(range(len(one))), stage, stages, chunks, group)
        if chunks > 1
        else one_forward_one_backward(list(range(len(one))), stage, stages)
        for rank, one in enumerate(queues)
        for stage in range(stages)
    }
    clocks = dict.fromkeys(waiting, 0.0)
    ran: dict[tuple[int, str, int, int], Ran] = {}
    progress = True
    while progress:
        progress = False
        for (rank, stage), operations in waiting.items():
            if not operations:
                continue
            kind, place, chunk = operations[0]
            cells = together[rank, place]
            at = chunk * stages + stage
            needed = fed_by(kind, place, at, stages * chunks - 1)
            if any(waiting[r, stage][:1] != [(kind, i, chunk)] for r, i in cells):
                continue
            ready = [clocks[r, stage] for r, _ in cells]
            if needed is not None:
                before = [(r, needed[0], i, needed[2]) for r, i in cells]
                if any(one not in ran for one in before):
                    continue
                ready += [ran[one].end_s for one in before]
            whole = max(seconds.get((r // size, i), 0.0) for r, i in cells)
            own = whole * pipeline.row_weights[at] / 3
            end = max(ready) + (own if kind == "F" else 2 * own)
            for r, i in cells:
                waiting[r, stage].pop(0)
                clocks[r, stage] = end
                ran[r, kind, i, at] = Ran(max(ready), end)
            progress = True
    return None if any(waiting.values()) else ran

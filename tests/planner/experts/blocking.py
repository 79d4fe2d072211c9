"""Ranks that share experts, run with blocking semantics: each knows only what it waits for.

A worker is a stage of a rank. In every layer of its next operation it waits for its ring and for
all ranks of its domain, so that nobody of them gets ahead of another one's position.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from megatron_hdp.planner import Plan
from megatron_hdp.planner.lockstep import PADDING
from megatron_hdp.planner.pipeline import Pipeline
from tests.planner.test_execution import one_forward_one_backward
from tests.planner.test_interleaved_execution import fed_by, interleaved

Operation = tuple[str, int, int]  # "F" or "B", position, chunk
Cell = tuple[int, int]  # rank, position


def operations_of(count: int, stage: int, stages: int, chunks: int) -> list[Operation]:
    """What a stage of a rank with so many positions runs, in order."""
    places = list(range(count))
    if chunks == 1:
        return [(kind, i, 0) for kind, i in one_forward_one_backward(places, stage, stages)]
    return interleaved(places, stage, stages, chunks, Pipeline(stages, chunks).group_size)


def company(plan: Plan, lists: Sequence[np.ndarray], size: int) -> dict[Cell, set[Cell]]:
    """Of a rank at a position, the ranks and positions that it waits for: rings and domains."""
    cells = [(rank, place) for rank, one in enumerate(lists) for place in range(len(one))]
    ties: dict[tuple[object, ...], set[Cell]] = {}
    for rank, place in cells:
        ties.setdefault(("domain", rank // size, place), set()).add((rank, place))
        m = int(lists[rank][place])
        if m != PADDING:
            ties.setdefault(("ring", m), set()).add((rank, place))
    found = {cell: {cell} for cell in cells}
    for tie in ties.values():
        whole = set().union(*(found[cell] for cell in tie))
        found |= dict.fromkeys(whole, whole)
    return found


def run_blocking(
    plan: Plan,
    lists: Sequence[np.ndarray],
    size: int,
    pipeline: Pipeline,
    seconds: Mapping[tuple[int, int], float],
) -> float | None:
    """When the last rank ends; None: they wait for each other for ever.

    Args:
        plan: its micro-batches.
        lists: what each rank runs, by position.
        size: ranks of a domain.
        pipeline: that each rank is.
        seconds: by domain and position, all stages; what is missing takes no time.
    """
    stages, chunks, group = pipeline.stages, pipeline.chunks, pipeline.group_size
    lists = [np.append(one, np.full(-len(one) % group, PADDING)) for one in lists]
    together = company(plan, lists, size)
    waiting = {
        (rank, stage): operations_of(len(one), stage, stages, chunks)
        for rank, one in enumerate(lists)
        for stage in range(stages)
    }
    clocks = dict.fromkeys(waiting, 0.0)
    ended: dict[tuple[int, str, int, int], float] = {}  # by rank and operation
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
                if any(one not in ended for one in before):
                    continue
                ready += [ended[one] for one in before]
            whole = max(seconds.get((r // size, i), 0.0) for r, i in cells)
            own = whole * pipeline.row_weights[at] / 3
            end = max(ready) + (own if kind == "F" else 2 * own)
            for r, i in cells:
                waiting[r, stage].pop(0)
                clocks[r, stage] = ended[r, kind, i, at] = end
            progress = True
    return None if any(waiting.values()) else max(clocks.values())

"""Runs slots under the interleaved schedule with blocking semantics: never a deadlock.

A worker is one stage of one rank with several model chunks. It enters its next operation and waits
for its ring, and knows nothing of the others but what it waits for.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hdp.planner.lockstep import PADDING, slots
from megatron_hdp.planner.pipeline import Pipeline
from tests.planner.problems import repeatable
from tests.support.random_plans import random_plan

slowly = repeatable(60)


def table(micro_batches, chunks, group):
    """What a stage runs forward, in order: a group through every chunk, then the next group."""
    return [
        (m, chunk)
        for begin in range(0, len(micro_batches), group)
        for chunk in range(chunks)
        for m in micro_batches[begin : begin + group]
    ]


def interleaved(micro_batches, stage, stages, chunks, group):
    """Pass, micro-batch and chunk of each operation of a stage, in Megatron's order."""
    forwards = [("F", m, chunk) for m, chunk in table(micro_batches, chunks, group)]
    backwards = [("B", m, chunks - 1 - chunk) for m, chunk in table(micro_batches, chunks, group)]
    warm_up = min(len(forwards), 2 * (stages - 1 - stage) + (chunks - 1) * group)
    order = forwards[:warm_up]
    for i in range(len(forwards) - warm_up):
        order += [forwards[warm_up + i], backwards[i]]
    return order + backwards[len(forwards) - warm_up :]


def fed_by(kind, m, at, last):
    """What must have ended: passes run through the stages of all chunks, one behind another."""
    if kind == "F":
        return ("F", m, at - 1) if at else None
    return ("B", m, at + 1) if at < last else ("F", m, at)


def run_blocking(queues, rings, stages, chunks, group):
    """Whether every operation ends."""
    waiting = {
        (rank, stage): interleaved(queue, stage, stages, chunks, group)
        for rank, queue in enumerate(queues)
        for stage in range(stages)
    }
    done, progress = set(), True
    while progress:
        progress = False
        for (_, stage), operations in waiting.items():
            if not operations:
                continue
            kind, m, chunk = operations[0]
            at = chunk * stages + stage
            needed = fed_by(kind, m, at, stages * chunks - 1)
            members = [waiting[rank, stage] for rank in rings[m]]
            if needed is not None and needed not in done:
                continue
            if all(queue and queue[0] == (kind, m, chunk) for queue in members):
                for queue in members:
                    queue.pop(0)
                done.add((kind, m, at))
                progress = True
    return not any(waiting.values())


def with_paddings_named(plan, lists):
    """The lists with a number of its own for each padding, and the ring of every number."""
    rings = [plan.micro_batch(m).ranks for m in range(plan.num_micro_batches)]
    queues = []
    for rank, one in enumerate(lists):
        queues.append([])
        for m in one.tolist():
            if m == PADDING:
                m = len(rings)
                rings.append((rank,))
            queues[-1].append(m)
    return queues, rings


def made_of(lengths, ranks, seed):
    return random_plan(np.array(lengths), ranks=ranks, tokens_per_rank=64, seed=seed)


BATCH = {
    "lengths": st.lists(st.integers(1, 120), min_size=1, max_size=40),
    "ranks": st.integers(2, 5),
    "seed": st.integers(0, 99),
}


@pytest.mark.parametrize("stages, chunks", [(2, 2), (2, 3), (4, 2), (4, 3)])
@slowly
@given(**BATCH)
def test_slots_in_whole_groups_never_deadlock(stages, chunks, lengths, ranks, seed):
    made, group = made_of(lengths, ranks, seed), Pipeline(stages, chunks).group_size
    lists = slots(made, aligned=True, group_size=group)
    assert all(len(one) % stages == 0 for one in lists)
    assert run_blocking(*with_paddings_named(made, lists), stages, chunks, group)


@pytest.mark.parametrize("stages, chunks", [(2, 2), (2, 3), (4, 2), (4, 3)])
@pytest.mark.parametrize("fault", ["a group of one more, cut short", "counts as they are"])
def test_groups_that_are_cut_short_deadlock(stages, chunks, fault):
    """Both are what Megatron allows, or would with one count on all pipelines."""
    group = stages + 1 if fault.startswith("a group") else stages
    stuck = 0
    for seed in range(150):
        rng = np.random.default_rng(seed)
        made = made_of(rng.integers(1, 150, 10 * stages), 3, seed)
        lists = slots(made, aligned=True)
        if fault.startswith("a group"):
            lists = [
                np.append(one, np.full(allowed_padding(len(one), stages, group), PADDING))
                for one in lists
            ]
        stuck += not run_blocking(*with_paddings_named(made, lists), stages, chunks, group)
    assert stuck > 0


def allowed_padding(count, stages, group):
    """Up to the next count that Megatron takes: the last group whole, or of one for each stage."""
    padding = 0
    while count + padding < group or 0 < (count + padding) % group < stages:
        padding += 1
    return padding


def test_one_chunk_needs_no_groups():
    made = made_of([3, 40, 90], 3, 0)
    assert Pipeline(4).group_size == 1
    for one, other in zip(
        slots(made, aligned=True), slots(made, aligned=True, group_size=1), strict=True
    ):
        assert np.array_equal(one, other)

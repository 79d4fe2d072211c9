"""Slots under the interleaved schedule, run by workers that block: never a deadlock."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hdp.planner.lockstep import PADDING, slots
from megatron_hdp.planner.pipeline import Pipeline
from tests.planner.blocking import fed_by, interleaved, run_blocking
from tests.planner.problems import repeatable
from tests.support.random_plans import random_plan

__all__ = ["fed_by", "interleaved"]

slowly = repeatable(60)


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
    pipeline = Pipeline(stages, chunks)
    lists = slots(made_of(lengths, ranks, seed), aligned=True, group_size=pipeline.group_size)
    assert all(len(one) % stages == 0 for one in lists)
    assert run_blocking(lists, pipeline, group=stages) is not None


@pytest.mark.parametrize(
    "stages, chunks",
    [(2, 2), (2, 3), *(pytest.param(4, one, marks=pytest.mark.slow) for one in (2, 3))],
)
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
        stuck += run_blocking(lists, Pipeline(stages, chunks), group=group) is None
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

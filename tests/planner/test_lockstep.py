"""Slots: nothing lost, the plan's order kept, positions equal, counts equal where they must be."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hdp.planner import Problem, make_plan, plan
from megatron_hdp.planner.lockstep import PADDING, planned_for, slots
from megatron_hdp.planner.pipeline import Pipeline
from megatron_hdp.strategies import BY_NAME
from tests.support.examples import some
from tests.support.random_plans import random_plan


def check(made, lists, *, aligned, lockstep_ranks):
    assert len(lists) == made.num_ranks
    where = {}
    for rank, one in enumerate(lists):
        assert len(one) >= 1
        assert one[one != PADDING].tolist() == made.micro_batches_of(rank).tolist()
        for position, m in enumerate(one.tolist()):
            if m != PADDING:
                where.setdefault(m, set()).add(position)
    if aligned:
        assert all(len(positions) == 1 for positions in where.values()), where
    counts = np.array([len(one) for one in lists]).reshape(-1, lockstep_ranks)
    assert (counts == counts[:, :1]).all()


@settings(max_examples=some(60))
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    ranks=st.sampled_from([1, 2, 3, 4, 6]),
    lockstep_ranks=st.sampled_from([1, 2, 3, 6]),
    seed=st.integers(0, 99),
)
def test_any_plan(lengths, ranks, lockstep_ranks, seed):
    lockstep_ranks = lockstep_ranks if ranks % lockstep_ranks == 0 else 1
    made = random_plan(np.array(lengths), ranks=ranks, tokens_per_rank=64, seed=seed)
    lists = slots(made, aligned=True, lockstep_ranks=lockstep_ranks)
    check(made, lists, aligned=True, lockstep_ranks=lockstep_ranks)
    check(made, slots(made, aligned=False), aligned=False, lockstep_ranks=1)


def test_a_plan_for_pipelines_needs_no_padding():
    lengths = np.random.default_rng(0).integers(1, 500, 60)
    made = plan(lengths, ranks=5, tokens_per_rank=128, strategy="pp-balance", pipeline_stages=4)
    lists = slots(made, aligned=True)
    assert [one.tolist() for one in lists] == [made.micro_batches_of(r).tolist() for r in range(5)]


def test_a_rank_without_micro_batch_runs_padding():
    made = plan([3], ranks=3, tokens_per_rank=8)
    lists = [one.tolist() for one in slots(made, aligned=False)]
    assert sorted(lists) == [[PADDING], [PADDING], [0]]


def test_what_makes_no_sense_is_refused():
    made = plan([3], ranks=3, tokens_per_rank=8)
    with pytest.raises(ValueError, match="2 ranks in lockstep need aligned"):
        slots(made, aligned=False, lockstep_ranks=2)
    with pytest.raises(ValueError, match="3 ranks are no multiple of 2"):
        slots(made, aligned=True, lockstep_ranks=2)


def test_the_check_fails_without_alignment():
    """Plans that the planner makes without pipelines in mind do put rings at different positions"""
    rng = np.random.default_rng(0)
    misplaced = 0
    for seed in range(20):
        made = random_plan(rng.integers(1, 60, 12), ranks=4, tokens_per_rank=64, seed=seed)
        try:
            check(made, slots(made, aligned=False), aligned=True, lockstep_ranks=1)
        except AssertionError:
            misplaced += 1
    assert misplaced > 10


@pytest.mark.parametrize(("strategy", "stages"), [("auto", 2), ("pp-balance", 2), ("naive", 1)])
def test_a_strategy_that_knows_no_pipelines_plans_for_one_stage(strategy, stages):
    given = Problem.of([5], ranks=4, tokens_per_rank=20, pipeline_stages=2)
    assert planned_for(strategy, given).pipeline == Pipeline(stages)


@pytest.mark.parametrize("strategy", BY_NAME)
def test_every_strategy_plans_for_pipelines(strategy):
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(40):
        problem = Problem.of(
            rng.integers(1, 60, 5), ranks=4, tokens_per_rank=20, max_length=60, pipeline_stages=2
        )
        made = make_plan(planned_for(strategy, problem), strategy)
        check(made, slots(made, aligned=True), aligned=True, lockstep_ranks=1)
        try:
            make_plan(problem, strategy)
        except ValueError as error:
            assert "use strategy pp-balance" in str(error)
            refused += 1
    assert refused == 0 if BY_NAME[strategy].on_pipelines else refused > 20

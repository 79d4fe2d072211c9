"""Any strategy on one batch: checked, replayed, and with a reason where it has no plan."""

import dataclasses

import numpy as np
import pytest

from megatron_hdp.cli import plan_outcomes
from megatron_hdp.cli.plan_outcomes import (
    COMPARED,
    Outcome,
    Request,
    compare,
    evaluated,
    outcome_of,
)
from megatron_hdp.planner import LLAMA_7B, STRATEGIES, evaluate
from tests.planner.problems import small_plan

LENGTHS = np.random.default_rng(0).integers(1, 9000, size=50)


def request_of(**changes):
    arguments = {"lengths": LENGTHS, "ranks": 4, "tokens_per_rank": 4096, "cost_model": LLAMA_7B}
    return Request.of(**(arguments | changes))


def test_a_comparison_is_of_every_strategy_and_keeps_what_is_known(monkeypatch):
    planned = []

    def pretend(strategy, request):
        planned.append(strategy)
        return Outcome(strategy, problem="pretended")

    monkeypatch.setattr(plan_outcomes, "outcome_of", pretend)
    known = Outcome("naive")
    outcomes = compare(request_of(), known)
    assert [outcome.strategy for outcome in outcomes] == list(COMPARED)
    assert known in outcomes and "naive" not in planned
    shared = compare(request_of(expert_parallel_size=2), known)
    assert {one.strategy for one in shared} == set(STRATEGIES) - {"auto"}


@pytest.mark.parametrize("strategy", ["static", "naive", "dp-balance"])
def test_an_outcome_is_a_plan_with_its_times(strategy):
    outcome = outcome_of(strategy, request_of())
    assert (outcome.strategy, outcome.problem) == (strategy, None)
    assert outcome.plan.strategy == strategy
    assert outcome.evaluation.makespan_s == evaluate(outcome.plan, LLAMA_7B).makespan_s


def test_arguments_reach_the_planner():
    short = LENGTHS.clip(max=4000)
    for changes, degree in (({"max_length": 16_000}, 4), ({}, 1)):
        made = plan_outcomes.plan_with("static", request_of(lengths=short, **changes))
        assert set(np.diff(made.rank_offsets)) == {degree}


def test_a_plan_that_only_does_not_fit_has_its_times():
    outcome = evaluated(small_plan(tokens_per_rank=8), request_of())
    assert outcome.evaluation is not None
    assert outcome.problem.startswith("does not fit: plan breaks rule 'fit': micro-batch 0 holds")


@pytest.mark.parametrize("changes", [{"sequences": [0, 2, 3, 3]}, {"ranks": [0, 1, 1, 3, 0]}])
def test_a_plan_that_cannot_run_is_refused(changes):
    with pytest.raises(ValueError, match="naive cannot run: plan breaks rule"):
        evaluated(small_plan(**changes), request_of())


def test_a_plan_for_one_stage_may_break_the_positions_of_several():
    made = small_plan(
        lengths=[20, 5, 9, 4],
        rank_offsets=[0, 1, 3],
        ranks=[0, 0, 1],
        sequence_offsets=[0, 1, 3],
        sequences=[2, 0, 3],
        local_offsets=[0, 0, 1],
        local_ranks=[1],
        tokens_per_rank=100,
        offload_ratios=[0.0, 0.0],
    )
    assert evaluated(made, request_of()).problem is None
    with pytest.raises(ValueError, match="different positions.*with 2 pipeline stages use pp-bal"):
        evaluated(made, request_of(pipeline_stages=2))


def test_the_proven_bound_is_the_tightest_there_is():
    """Three equal sequences on four ranks: to end before one rank alone, each needs a ring."""
    links = {"intra_node_bytes_per_s": 7e9, "inter_node_bytes_per_s": 7e9}
    slow_links = dataclasses.replace(LLAMA_7B, **links)
    lengths = np.array([16_384] * 3)
    request = request_of(lengths=lengths, tokens_per_rank=16_384, cost_model=slow_links)
    outcome = outcome_of("dp-balance", request)
    assert outcome.evaluation.lower_bound_s < 0.99 * outcome.proven_bound_s
    assert outcome.proven_bound_s <= outcome.evaluation.makespan_s
    piped = outcome_of("static", request_of(pipeline_stages=2))
    assert piped.proven_bound_s == piped.evaluation.lower_bound_s


def test_stages_count():
    alone, piped = (
        outcome_of("static", request_of(pipeline_stages=stages)).evaluation for stages in (1, 2)
    )
    assert (alone.pipeline_stages, piped.pipeline_stages) == (1, 2)
    assert piped.makespan_s < alone.makespan_s

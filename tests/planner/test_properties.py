"""What holds for every strategy on every problem that has an answer."""

import pytest
from hypothesis import given, settings

from megatron_hdp.planner import Plan, evaluate
from tests.planner.problems import EXECUTED_STRATEGIES, Problem, agree, problems, repeatable

pytestmark = pytest.mark.smoke
quickly = repeatable(60)


def check_rules_and_figures(strategy: str, problem: Problem) -> None:
    plan = problem.plan(strategy)
    plan.validate()
    agree(plan, evaluate(plan, problem.model))
    assert plan.summary["max_tokens_on_a_rank"] <= problem.tokens_per_rank


@pytest.mark.parametrize("strategy", EXECUTED_STRATEGIES)
@quickly
@given(problem=problems())
def test_rules_hold_and_figures_agree_with_the_evaluator(strategy: str, problem: Problem) -> None:
    check_rules_and_figures(strategy, problem)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", EXECUTED_STRATEGIES)
@settings(quickly, max_examples=3000)
@given(problem=problems())
def test_rules_hold_on_many_problems(strategy: str, problem: Problem) -> None:
    check_rules_and_figures(strategy, problem)


@pytest.mark.parametrize("strategy", EXECUTED_STRATEGIES)
@quickly
@given(problem=problems())
def test_same_plan_again_and_after_a_round_trip(strategy: str, problem: Problem) -> None:
    plan = problem.plan(strategy)
    assert problem.plan(strategy).fingerprint() == plan.fingerprint()
    copy = Plan.from_json(plan.to_json())
    assert copy.fingerprint() == plan.fingerprint()
    assert copy.summary == plan.summary
    copy.validate()


@quickly
@given(problem=problems())
def test_dp_balance_is_no_slower_than_the_others(problem: Problem) -> None:
    plans = {s: problem.plan(s) for s in EXECUTED_STRATEGIES}
    makespan = {s: evaluate(p, problem.model).makespan_s for s, p in plans.items()}
    assert makespan["dp-balance"] <= makespan["naive"] * (1 + 1e-9)
    assert makespan["dp-balance"] <= makespan["static"] * (1 + 1e-9)


@quickly
@given(problem=problems())
def test_dp_balance_has_no_more_ring_traffic_than_a_plan_as_fast(problem: Problem) -> None:
    balanced = problem.plan("dp-balance").summary
    for strategy in ("naive", "static"):
        other = problem.plan(strategy).summary
        if other["makespan_s"] <= balanced["makespan_s"]:
            assert balanced["ring_tokens"] <= other["ring_tokens"], strategy


@quickly
@given(problem=problems())
def test_every_micro_batch_of_a_static_plan_has_the_same_degree(problem: Problem) -> None:
    plan = problem.plan("static")
    degrees = {len(plan.micro_batch(m).ranks) for m in range(plan.num_micro_batches)}
    assert len(degrees) == 1
    plan.validate(pipeline_stages=2)

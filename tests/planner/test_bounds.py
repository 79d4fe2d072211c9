"""No plan beats the bounds, whoever made it, and the bounds are not idle."""

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_hdp.planner import LLAMA_7B, CostModel, evaluate, plan, tight_bound_s
from tests.planner.problems import EXECUTED_STRATEGIES, Problem, problems, proven_s
from tests.support.random_plans import random_plan

quickly = settings(
    max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.parametrize("strategy", EXECUTED_STRATEGIES)
@quickly
@given(problem=problems())
def test_no_strategy_beats_the_proven_bound(strategy: str, problem: Problem) -> None:
    result = evaluate(problem.plan(strategy), problem.model)
    assert result.lower_bound_s <= proven_s(problem) * (1 + 1e-9)
    assert proven_s(problem) <= result.makespan_s * (1 + 1e-9)


@settings(quickly, max_examples=200)
@given(problem=problems(), seed=st.integers(0, 5))
def test_no_random_plan_beats_the_proven_bound(problem: Problem, seed: int) -> None:
    """Several sequences to a ring, any degree, locals: what the proof must hold for."""
    problem = dataclasses.replace(problem, offload="off")
    made = random_plan(
        problem.lengths,
        ranks=problem.ranks,
        tokens_per_rank=problem.tokens_per_rank,
        slice_multiple=problem.slice_multiple,
        seed=seed,
    )
    assert proven_s(problem) <= evaluate(made, problem.model).makespan_s * (1 + 1e-9)


def test_a_slow_rank_that_memory_makes_a_sequence_use() -> None:
    # 20 tokens on 2 ranks of 10: (400 + 20) / 2 on the slow one takes 2,100 s; alone the fast one
    # would take 420
    cost = CostModel(a=1.0, b=1.0, kv_bytes_per_token=0.0)
    arguments = {"ranks": 2, "tokens_per_rank": 10, "cost_model": cost, "rank_speeds": [1.0, 0.1]}
    made = plan([20], **arguments)
    assert made.summary["lower_bound_s"] == pytest.approx(420)
    assert tight_bound_s([20], **arguments) == pytest.approx(2100)
    assert made.summary["makespan_s"] == pytest.approx(2100)


def test_every_rank_pays_for_its_micro_batches() -> None:
    cost = CostModel(a=0.0, b=1.0, kv_bytes_per_token=0.0, g=5.0)
    arguments = {"ranks": 2, "tokens_per_rank": 10, "cost_model": cost}
    # 40 tokens are at least 4 micro-batches of 10
    assert tight_bound_s([10] * 4, **arguments) == pytest.approx((40 + 4 * 5) / 2)
    assert plan([10] * 4, **arguments).summary["makespan_s"] == pytest.approx(30)


def test_traffic_that_memory_exposes() -> None:
    """Two thirds of the batch must be shared by 8 ranks, across slow links."""
    slow = dataclasses.replace(LLAMA_7B, inter_node_bytes_per_s=1e9, ranks_per_node=4)
    lengths = [65_536, 4096, 4096, 4096, 4096, 4096, 4096, 4096, 4096]
    arguments = {"ranks": 8, "tokens_per_rank": 8192, "cost_model": slow}
    made = plan(lengths, **arguments)
    proven = tight_bound_s(lengths, **arguments)
    assert proven > 5 * made.summary["lower_bound_s"]
    assert proven == pytest.approx(made.summary["makespan_s"], rel=0.02)

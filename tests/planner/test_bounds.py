"""No plan beats the bounds, whoever made it, and the bounds are not idle."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hdp.planner import (
    LLAMA_7B,
    CostModel,
    Plan,
    evaluate,
    pipeline_lower_bound_s,
    plan,
    tight_bound_s,
)
from megatron_hdp.planner.bounds import own_times_s
from tests.planner.problems import EXECUTED_STRATEGIES, Problem, problems, repeatable, rings_of

quickly = repeatable(80)
FREE = CostModel(a=0.0, b=0.0, kv_bytes_per_token=0.0)
LINEAR = dataclasses.replace(FREE, b=1.0)


@pytest.mark.parametrize("strategy", EXECUTED_STRATEGIES)
@quickly
@given(problem=problems())
def test_no_strategy_beats_the_proven_bound(strategy: str, problem: Problem) -> None:
    result = evaluate(problem.plan(strategy), problem.model)
    assert result.lower_bound_s <= problem.proven_s * (1 + 1e-9)
    assert problem.proven_s <= result.makespan_s * (1 + 1e-9)


@repeatable(200)
@given(problem=problems(), seed=st.integers(0, 5))
def test_no_random_plan_beats_the_proven_bound(problem: Problem, seed: int) -> None:
    made = problem.random_plan(seed)
    assert problem.proven_s <= evaluate(made, problem.model).makespan_s * (1 + 1e-9)


def test_a_slow_rank_that_memory_makes_a_sequence_use() -> None:
    # 20 tokens on 2 ranks of 10: (400 + 20) / 2 on the slow one takes 2,100 s; alone the fast one
    # would take 420
    cost = dataclasses.replace(LINEAR, a=1.0)
    arguments = {"ranks": 2, "tokens_per_rank": 10, "cost_model": cost, "rank_speeds": [1.0, 0.1]}
    made = plan([20], **arguments)
    assert made.summary["lower_bound_s"] == pytest.approx(420)
    assert tight_bound_s([20], **arguments) == pytest.approx(2100)
    assert made.summary["makespan_s"] == pytest.approx(2100)


def test_every_rank_pays_for_its_micro_batches() -> None:
    cost = dataclasses.replace(LINEAR, g=5.0)
    arguments = {"ranks": 2, "tokens_per_rank": 10, "cost_model": cost}
    # 40 tokens are at least 4 micro-batches of 10
    assert tight_bound_s([10] * 4, **arguments) == pytest.approx((40 + 4 * 5) / 2)
    assert plan([10] * 4, **arguments).summary["makespan_s"] == pytest.approx(30)


def test_every_rank_pays_for_its_blocks() -> None:
    # 2 layers x 2 passes x 0.25 s a block; 40 tokens are at least 4 micro-batches of 10
    cost = dataclasses.replace(LINEAR, block_s=0.25, num_layers=2)
    arguments = {"ranks": 2, "tokens_per_rank": 10, "cost_model": cost}
    assert tight_bound_s([10] * 4, **arguments) == pytest.approx((40 + 4) / 2)
    assert plan([10] * 4, **arguments).summary["makespan_s"] == pytest.approx(22)
    # 20 tokens on two ranks are two steps, a block each, on both
    made = plan([20], **arguments)
    assert made.summary["lower_bound_s"] == pytest.approx(10 + 2)
    assert tight_bound_s([20, 20], **arguments) == pytest.approx(2 * (10 + 2))
    assert plan([20, 20], **arguments).summary["makespan_s"] == pytest.approx(24)


def test_a_ring_pays_for_its_hops() -> None:
    # on D ranks 64 / D s, and D - 1 hops of 3 s in each pass, of which a step's 16 / D^2 s of
    # attention hide a third forward, two thirds backward; on two ranks 32 + 6 - 4 s
    hops = {"intra_node_hop_s": 3.0, "inter_node_hop_s": 3.0}
    cost = dataclasses.replace(FREE, b=3.0, attention_b=1.0, **hops)
    own_s = own_times_s(16, 4, cost)
    backward_s = 3 - 2 * 16 / 4 / 3
    assert own_s[:2].tolist() == pytest.approx([64, 32 + (3 - 16 / 4 / 3) + backward_s])
    assert own_s[2] == pytest.approx(64 / 3 + 2 * (3 - 16 / 9 / 3) + 2 * (3 - 2 * 16 / 9 / 3))
    assert own_s[3] == pytest.approx(16 + 3 * (3 - 1 / 3) + 3 * (3 - 2 / 3))
    made = plan([16], ranks=4, tokens_per_rank=16, cost_model=cost)
    assert made.summary["lower_bound_s"] == pytest.approx(own_s.min())
    assert made.summary["makespan_s"] == pytest.approx(own_s.min())


def test_latency_hides_a_short_sequence_beside_a_long_one() -> None:
    # 16 ranks of two stages, 15 hops of 1 s in each pass, longer than any step: 9 tokens beside
    # 151 take a 16th of their 9 / 16 s longer, that of the first step
    cost = dataclasses.replace(FREE, attention_b=1.0, inter_node_hop_s=0.5, ranks_per_node=1)
    lengths = np.array([151, 9])
    makespan_s = evaluate(one_ring_of(lengths, 16), cost, 2).makespan_s
    assert makespan_s == pytest.approx(160 / 16 / 16 + 15 * 2)
    alone_s = own_times_s(151, 16, cost, 2)[15]
    assert alone_s == pytest.approx(151 / 16 / 16 + 15 * 2)
    assert alone_s <= pipeline_lower_bound_s(lengths, 16, cost, 2, 10) <= makespan_s
    assert tight_bound_s(lengths, ranks=16, tokens_per_rank=10, cost_model=cost) <= makespan_s


def test_a_narrow_ring_may_leave_its_node_where_hops_are_shorter() -> None:
    # 20 tokens take 10 s on each of two ranks of two nodes, and a hop of 4 s in each pass
    hops = {"intra_node_hop_s": 50.0, "inter_node_hop_s": 4.0}
    cost = dataclasses.replace(LINEAR, ranks_per_node=2, **hops)
    lengths = np.array([20])
    across = dataclasses.replace(one_ring_of(lengths, 2), num_ranks=3, ranks=[0, 2])
    result = evaluate(across, cost)
    assert result.makespan_s == pytest.approx(18)
    assert result.lower_bound_s == pytest.approx(18)
    assert tight_bound_s(lengths, ranks=3, tokens_per_rank=10, cost_model=cost) <= 18


def one_ring_of(lengths: np.ndarray, ranks: int) -> Plan:
    """One micro-batch of all sequences, shared by all ranks."""
    capacity = -(-int(lengths.sum()) // ranks)
    everything = [range(len(lengths))]
    return rings_of([range(ranks)], lengths, sequences=everything, tokens_per_rank=capacity)


def test_traffic_that_memory_exposes() -> None:
    """Two thirds of the batch must be shared by 8 ranks, across slow links."""
    slow = dataclasses.replace(LLAMA_7B, inter_node_bytes_per_s=1e9, ranks_per_node=4)
    lengths = [65_536, *[4096] * 8]
    arguments = {"ranks": 8, "tokens_per_rank": 8192, "cost_model": slow}
    made = plan(lengths, **arguments)
    proven = tight_bound_s(lengths, **arguments)
    assert proven > 5 * made.summary["lower_bound_s"]
    assert proven == pytest.approx(made.summary["makespan_s"], rel=0.02)

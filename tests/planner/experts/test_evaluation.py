"""Plans in lockstep: by hand, against the simulator, against a loop, and never below the bound."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hdp.planner import CostModel, Plan, PlanError
from megatron_hdp.planner.experts import figures_in_lockstep, lockstep_bound_s
from megatron_hdp.planner.lockstep import PADDING, slots
from megatron_hdp.planner.pipeline import Pipeline
from megatron_hdp.simulator.execution import execute
from tests.planner.blocking import run_blocking
from tests.planner.problems import COST_MODELS, rings_of
from tests.support.examples import some
from tests.support.random_plans import random_plan

LINEAR = CostModel(a=0.0, b=1.0, b_experts=2.0, kv_bytes_per_token=0.0, g=0.5)


def plan_of(rings, lengths, *, ranks, positions=None, capacity=100, **further):
    """Micro-batches of one sequence each, on these ranks."""
    fields = {"num_ranks": ranks, "tokens_per_rank": capacity, "positions": positions} | further
    return rings_of(rings, lengths, strategy="by hand", **fields)


def test_a_domain_waits_for_its_slowest_and_shares_experts():
    # position 0: 6 and 2 tokens; position 1: 4 tokens beside padding
    made = plan_of([[0], [1], [0]], [6, 2, 4], ranks=2)
    found = figures_in_lockstep(made, LINEAR, 2)
    first, second = (6 + 0.5) + 2 * 8 / 2, (4 + 0.5) + 2 * 4 / 2
    np.testing.assert_allclose(found.position_s, [[first], [second]])
    assert found.makespan_s == pytest.approx(first + second)
    assert (found.num_positions, found.padding_share) == (2, 0.25)
    assert found.lower_bound_s == pytest.approx(3 * 12 / 2)
    np.testing.assert_allclose(found.busy_s, [10 + 1.0 + 12, 2 + 0.5 + 12])


def test_a_ring_over_domains_ties_their_positions():
    # domain 0 has a position more in front of the ring: domain 1 waits with padding
    made = plan_of([[1], [1, 2], [3]], [10, 8, 4], ranks=4)
    found = figures_in_lockstep(made, dataclasses.replace(LINEAR, g=0.0), 2)
    np.testing.assert_allclose(found.position_s, [[10 + 10, 4 + 4], [4 + 4, 4 + 4]])
    assert found.makespan_s == pytest.approx(20 + 8)


def test_a_slow_rank_holds_experts_up():
    slow = dataclasses.replace(LINEAR, g=0.0, rank_speeds=(0.5, 1.0))
    found = figures_in_lockstep(plan_of([[0], [1]], [6, 6], ranks=2), slow, 2)
    assert found.makespan_s == pytest.approx(6 / 0.5 + 2 * 12 / 2 / 0.5)


def test_a_plans_own_positions_count():
    made = plan_of([[0], [1]], [6, 6], ranks=2, positions=[0, 1])
    assert [one.tolist() for one in slots(made, aligned=True, lockstep_ranks=2)] == [
        [0, PADDING],
        [PADDING, 1],
    ]
    apart = figures_in_lockstep(made, LINEAR, 2).makespan_s
    beside = figures_in_lockstep(plan_of([[0], [1]], [6, 6], ranks=2), LINEAR, 2).makespan_s
    assert apart == pytest.approx(beside + 6.5)


def test_positions_are_part_of_a_plan():
    made = plan_of([[0], [1]], [6, 6], ranks=2, positions=[0, 1])
    made.validate()
    made.validate(pipeline_stages=2)
    again = Plan.from_json(made.to_json())
    assert again.positions.tolist() == [0, 1]
    assert again.fingerprint() == made.fingerprint()
    assert made.fingerprint() != dataclasses.replace(made, positions=[0, 0]).fingerprint()
    assert made.fingerprint() != dataclasses.replace(made, positions=None).fingerprint()


@pytest.mark.parametrize(
    "rings, positions, message",
    [
        ([[0], [0]], [1, 1], "rank 0 runs micro-batch 1 at position 1, after micro-batch 0"),
        ([[0, 1], [1]], [1, 0], "rank 1 runs micro-batch 1 at position 0, after micro-batch 0"),
        ([[0], [1]], [0, -1], "position of micro-batch 1 is -1"),
        ([[0], [1]], [0], "positions has 1 entries; expected 2"),
    ],
)
def test_positions_that_no_rank_can_run_are_refused(rings, positions, message):
    with pytest.raises(PlanError, match=message):
        plan_of(rings, [6, 6], ranks=2, positions=positions).validate()


def test_a_position_is_in_all_micro_batches_of_a_file_or_in_none():
    text = plan_of([[0], [1]], [6, 6], ranks=2, positions=[0, 1]).to_json().decode()
    with pytest.raises(ValueError, match=r"micro_batches\[1\] lacks the key 'position'"):
        Plan.from_json(text.replace(',"position":1', ""))
    with pytest.raises(ValueError, match=r"micro_batches\[0\].position is -3"):
        Plan.from_json(text.replace('"position":0', '"position":-3'))


@st.composite
def random_plans(draw):
    size = draw(st.sampled_from([1, 2, 3]))
    ranks = size * draw(st.integers(1, 4))
    lengths = draw(st.lists(st.integers(1, 60), min_size=1, max_size=20))
    return random_plan(
        lengths, ranks=ranks, tokens_per_rank=64, seed=draw(st.integers(0, 99))
    ), size


@st.composite
def pipelines(draw):
    stages = draw(st.integers(1, 4))
    chunks = draw(st.integers(1, 3)) if stages > 1 else 1
    weights = draw(st.lists(st.integers(0, 5), min_size=stages * chunks, max_size=stages * chunks))
    return Pipeline(stages, chunks, tuple(weights) if sum(weights) else ())


@settings(max_examples=some(200), derandomize=True)
@given(found=random_plans(), name=st.sampled_from(sorted(COST_MODELS)), pipeline=pipelines())
def test_no_plan_is_below_the_bound(found, name, pipeline):
    made, size = found
    costs = dataclasses.replace(COST_MODELS[name], b_experts=COST_MODELS[name].b)
    figures = figures_in_lockstep(made, costs, size, pipeline)
    assert figures.lower_bound_s <= figures.makespan_s * (1 + 1e-9)
    if pipeline.stages == 1:
        bound_s = lockstep_bound_s(made.lengths, made.num_ranks, costs, size)
        assert bound_s == figures.lower_bound_s
    else:
        work_s = figures.total_compute_s / figures.total_speed * pipeline.stage_weights.max()
        assert figures.lower_bound_s >= work_s * (1 - 1e-9)


def test_a_domain_computes_beside_its_longest_sequence():
    # a ring would take for ever: rank 1 has 10 tokens of its own while rank 0 has as many
    made = plan_of([[0], [1]], [10, 10], ranks=2)
    costs = CostModel(a=0.0, b=1.0, kv_bytes_per_token=1e12, intra_node_bytes_per_s=1.0)
    found = figures_in_lockstep(made, costs, 2, Pipeline(2))
    assert found.makespan_s == pytest.approx(10.0)
    assert found.lower_bound_s == pytest.approx(10.0)


@settings(max_examples=some(40), derandomize=True)
@given(found=random_plans())
def test_without_experts_it_is_what_the_simulator_finds(found):
    made, size = found
    costs = dataclasses.replace(COST_MODELS["linear"], a=1e-4)  # no traffic to be hidden
    expected = execute(made, costs, lockstep_ranks=size).makespan_s
    if size > 1:
        assert figures_in_lockstep(made, costs, size).makespan_s == pytest.approx(expected)


@settings(max_examples=some(120), derandomize=True)
@given(found=random_plans(), pipeline=pipelines())
def test_ranks_that_wait_for_each_other_on_every_stage_find_the_same(found, pipeline):
    made, size = found
    costs = dataclasses.replace(COST_MODELS["linear"], a=1e-4, b_experts=3e-3)
    lists = slots(made, aligned=True, lockstep_ranks=size)
    seconds = {}
    for place in range(max(map(len, lists))):
        for first in range(0, made.num_ranks, size):
            members = [r for r in range(first, first + size) if place < len(lists[r])]
            if members:
                slowest = max(dense_s(made, lists[r][place], costs) for r in members)
                tokens = sum(tokens_of(made, lists[r][place], r) for r in members)
                seconds[first // size, place] = slowest + costs.b_experts * tokens / size
    ran = run_blocking(lists, pipeline, size=size, seconds=seconds)
    figures = figures_in_lockstep(made, costs, size, pipeline)
    assert figures.makespan_s == pytest.approx(max(one.end_s for one in ran.values()), rel=1e-9)
    last_s = 2 / 3 * pipeline.row_weights[0] * figures.duration_s
    assert (figures.backward_start_s[0] + last_s).max() <= figures.makespan_s * (1 + 1e-9)


def test_a_pipeline_of_domains_by_hand():
    # positions of 10 and 20 s on two stages: forwards take 1/6, backwards 1/3 of them on each
    made = plan_of([[0], [1], [0, 1]], [4, 1, 4], ranks=2)
    costs = dataclasses.replace(LINEAR, b=1.0, b_experts=2.4, g=0.0)
    found = figures_in_lockstep(made, costs, 2, Pipeline(2))
    np.testing.assert_allclose(found.position_s, [[4 + 2.4 * 5 / 2], [2 + 2.4 * 4 / 2]])
    first, second = 10.0, 6.8
    # first stage: F0, F1, B0, B1; second: F0, B0, F1, B1
    last = max(first / 3 + first / 3, first / 6 + second / 6) + second / 2
    assert found.makespan_s == pytest.approx(max(last, first / 3 + 2 * first / 3) + second / 3)
    assert found.pipeline_stages == 2
    np.testing.assert_allclose(found.busy_s, [(4 + 2 + 10.8) / 2, (1 + 2 + 10.8) / 2])
    np.testing.assert_allclose(found.duration_s, [first, first, second])
    np.testing.assert_allclose(found.own_s, [4 + 6, 1 + 6, 2 + 4.8, 2 + 4.8])


def tokens_of(made, m, rank):
    if m == PADDING:
        return 0.0
    one = made.micro_batch(m)
    shared = sum(made.lengths[s] for s in one.sequences) / len(one.ranks)
    return shared + sum(made.lengths[s] for s in one.local.get(rank, ()))


def dense_s(made, m, costs):
    """Of a micro-batch's slowest member."""
    if m == PADDING:
        return costs.g
    one, seconds = made.micro_batch(m), []

    def whole(sequences):
        return sum(costs.a * made.lengths[s] ** 2 + costs.b * made.lengths[s] for s in sequences)

    for rank in one.ranks:
        own = whole(one.sequences) / len(one.ranks) + whole(one.local.get(rank, ()))
        seconds.append(costs.g + own)
    return max(seconds)

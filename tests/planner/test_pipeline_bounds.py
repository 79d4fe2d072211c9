"""No plan of pipelines beats their bound, whole or in parts, and the bound is not idle."""

import dataclasses
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hdp.planner import (
    CostModel,
    Plan,
    evaluate,
    pipeline_lower_bound_s,
    plan,
    tight_bound_s,
)
from megatron_hdp.planner.evaluation import durations_s
from megatron_hdp.planner.lockstep import PADDING, slots
from megatron_hdp.planner.pipeline import Pipeline
from megatron_hdp.planner.pipeline_evaluation import RankLists, longest_paths, waits_of_parts
from tests.planner.problems import COST_MODELS, Problem, problems, repeatable
from tests.planner.test_pipeline_evaluation import SECONDS, one_rank, queues

UNEVEN = [Pipeline(2), Pipeline(3), Pipeline(5), Pipeline(3, 1, (2, 1, 0)), Pipeline(2, 1, (1, 9))]


def bound(lengths: list[int], ranks: int, stages: int, capacity: int, **changes: object) -> float:
    cost_model = dataclasses.replace(SECONDS, **changes)
    array = np.array(lengths, dtype=np.int64)
    return pipeline_lower_bound_s(array, ranks, cost_model, stages, capacity)


def test_the_bound_of_work() -> None:
    assert bound([1] * 80, 2, 4, 10) == pytest.approx(40 / 4, rel=0.06)
    assert bound([1] * 80, 2, 4, 10, rank_speeds=(1.0, 0.5)) == pytest.approx(
        80 / 1.5 / 4, rel=0.06
    )


def test_the_bound_of_the_longest_sequence() -> None:
    # alone on both ranks: 50 s; the other 60 s can only hide behind it at 12 s a second
    assert bound([100], 2, 4, 50) == pytest.approx(50)
    assert bound([100, *[1] * 60], 2, 4, 50) == pytest.approx(50 + 30 / 12)


def test_the_bound_of_sequences_that_exclude_each_other() -> None:
    # 51 tokens are more than half of 2 x 50: at least 25.5 s each, never at the same time
    assert bound([51, 51, 51], 2, 4, 50) >= 25.5 * 3 / 4 + 3 / 4 * 25.5 - 1e-9


def test_no_order_of_a_small_batch_beats_the_bound() -> None:
    # every order of four rings on both ranks, whatever the search would have tried
    lengths = [20, 12, 8, 3]
    least = bound(lengths, 2, 3, 10)
    ring = (0, 1)
    for order in permutations(range(4)):
        rings = [(*ring, i) for i in order]
        tokens = {(*ring, i): lengths[i] for i in order}
        assert evaluate(queues(rings, rings, tokens=tokens), SECONDS, 3).makespan_s >= least


def split(made: Plan, most_parts: int, seed: int) -> Plan:
    """The plan with its micro-batches in random numbers of parts, one of them in the most."""
    draw = np.random.default_rng(seed)
    parts = draw.integers(1, most_parts + 1, made.num_micro_batches)
    parts[draw.integers(len(parts))] = most_parts
    return dataclasses.replace(made, num_parts=parts, linear_tokens=10.0 * (seed % 9))


def executed_s(made: Plan, problem: Problem, pipeline: Pipeline) -> float:
    """Makespan of any plan, laid out in slots whose padding takes no time."""
    lists, num = slots(made, aligned=True), made.num_micro_batches
    flat = np.concatenate(lists)
    flat[flat == PADDING] = num + np.arange(int((flat == PADDING).sum()))
    num_padding = int((flat >= num).sum())
    parts = np.append(made.parts_of_each, np.ones(num_padding, dtype=np.int64))
    taken_s = durations_s(made, problem.model, pipeline.stages)
    each_s = np.repeat(np.append(taken_s, np.zeros(num_padding)) / parts, parts)
    both_s = np.concatenate([each_s / 3, 2 * each_s / 3])
    seconds = np.outer(pipeline.row_weights, both_s).ravel()
    rank_lists = RankLists(flat, np.array([len(one) for one in lists]))
    starts, finished = longest_paths(waits_of_parts(rank_lists, parts, pipeline), seconds)
    assert finished.all()
    return float((starts + seconds).max())


def bound_of(problem: Problem, pipeline: Pipeline, most_parts: int) -> float:
    found = tight_bound_s(
        problem.lengths,
        **problem.arguments,
        pipeline_stages=pipeline.stages,
        stage_weights=pipeline.weights or None,
        sequence_parts=most_parts,
    )
    lengths, whole = np.array(problem.lengths), problem.tokens_per_rank
    least_s = pipeline_lower_bound_s(
        lengths, problem.ranks, problem.model, pipeline, whole, 1, most_parts
    )
    assert least_s <= found
    return found


@pytest.mark.parametrize("pipeline", UNEVEN, ids=str)
@repeatable(25)
@given(problem=problems(), seed=st.integers(0, 99), most_parts=st.sampled_from([1, 2, 3, 7, 8, 21]))
def test_no_random_plan_in_parts_beats_the_bound(
    pipeline: Pipeline, problem: Problem, seed: int, most_parts: int
) -> None:
    made = split(problem.random_plan(seed), most_parts, seed)
    least_s = bound_of(problem, pipeline, most_parts)
    assert least_s <= executed_s(made, problem, pipeline) * (1 + 1e-9)
    more_s = bound_of(problem, pipeline, 2 * most_parts)
    assert more_s <= least_s * (1 + 1e-9)  # more parts cannot be worse than these


def test_a_bound_for_fewer_parts_is_too_high() -> None:
    """The planted fault: what is proven of at most half as many parts does not hold."""
    beaten = []
    for seed in range(20):
        problem = Problem((400, 20, 20), 4, 110, 1, "record")
        made = split(problem.random_plan(seed), 8, seed)
        made = dataclasses.replace(made, num_parts=[8] * made.num_micro_batches)
        seconds = executed_s(made, problem, Pipeline(4))
        assert bound_of(problem, Pipeline(4), 8) <= seconds
        beaten.append(bound_of(problem, Pipeline(4), 4) > seconds)
    assert any(beaten)


@pytest.mark.parametrize(("parts", "g"), [(1, 0), (3, 0), (4, 2.0), (8, 1.0), (20, 0.5)])
def test_one_sequence_in_parts_takes_what_the_bound_says(parts: int, g: float) -> None:
    """t (1 + (P - 1) / c) / P, and t has a launch for each of c parts."""
    cost_model = dataclasses.replace(SECONDS, g=g)
    made = dataclasses.replace(one_rank(96), num_parts=[parts], linear_tokens=1.0)
    found = evaluate(made, cost_model, 4)
    assert found.makespan_s == pytest.approx((96 + parts * g) * (1 + 3 / parts) / 4)
    best_s = min((96 + c * g) * (1 + 3 / c) / 4 for c in range(1, parts + 1))
    # 9 to 16 parts are looked at together, as are 17 to 20
    assert best_s * 0.92 <= found.lower_bound_s <= best_s * (1 + 1e-9)
    if parts <= 8:
        assert found.lower_bound_s == pytest.approx(best_s)


def test_queries_that_travel_instead_of_keys_are_counted() -> None:
    cost_model = dataclasses.replace(COST_MODELS["network-bound"], query_ratio=0.5)
    lengths = np.array([2000])
    bounds = [pipeline_lower_bound_s(lengths, 8, cost_model, 2, 300, 1, c) for c in (1, 16)]
    keys_s = pipeline_lower_bound_s(
        lengths, 8, dataclasses.replace(cost_model, query_ratio=0.0), 2, 300, 1, 16
    )
    assert bounds[1] < keys_s < bounds[0]


def test_keys_of_latents_that_no_part_must_make_are_in_no_bound():
    """Where queries travel, a member makes its own; whole, those of all members."""
    costs = CostModel(a=1e-9, b=1e-6, kv_bytes_per_token=1e-9, query_ratio=0.1)
    costs = dataclasses.replace(costs, merge_b=1e-4, projection_b=1e-4)
    asked = {"ranks": 16, "tokens_per_rank": 1000, "cost_model": costs, "pipeline_stages": 2}
    made = plan([16_000], **asked, sequence_parts=4)
    whole = plan([16_000], **asked)
    assert made.summary["makespan_s"] < 0.5 * whole.summary["makespan_s"]
    bounds_s = made.summary["lower_bound_s"], tight_bound_s([16_000], **asked, sequence_parts=4)
    assert max(bounds_s) <= made.summary["makespan_s"]

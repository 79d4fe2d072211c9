"""pp-balance: the rule of positions, balance on the presets, speeds, effort."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hdp.data.presets import preset_lengths
from megatron_hdp.planner import LLAMA_7B, CostModel, Plan, evaluate, plan
from tests.planner.problems import COST_MODELS, Problem, problems, repeatable

quickly = repeatable(80)
FREE_NETWORK = CostModel(a=0.0, b=1.0, kv_bytes_per_token=0.0)


def made_of(lengths: Any, ranks: int, capacity: int, stages: int, **others: Any) -> Plan:
    made = plan(
        lengths,
        ranks=ranks,
        tokens_per_rank=capacity,
        strategy="pp-balance",
        pipeline_stages=stages,
        **others,
    )
    made.validate(pipeline_stages=stages)
    return made


@quickly
@given(problem=problems(), stages=st.integers(1, 8), effort=st.integers(1, 3))
def test_rules_hold_and_it_is_never_slower(problem: Problem, stages: int, effort: int) -> None:
    cost_model = problem.model
    problem = dataclasses.replace(problem, effort=effort)
    balanced, again = (problem.plan("pp-balance", pipeline_stages=stages) for _ in range(2))
    balanced.validate(pipeline_stages=stages)
    assert balanced.summary["max_tokens_on_a_rank"] <= problem.tokens_per_rank
    assert again.fingerprint() == balanced.fingerprint()
    static = problem.plan("static", pipeline_stages=stages)
    ours, theirs = (evaluate(p, cost_model, stages).makespan_s for p in (balanced, static))
    assert ours <= theirs * (1 + 1e-9)


# target: bound / P + (P - 1) / P x a full micro-batch; where the lower bound is greater, that
PRESETS = [
    ("github", 64, 8192, 4, 0.87),
    ("byted", 64, 8192, 4, 0.87),
    ("github", 64, 32768, 4, 0.95),
    ("byted", 64, 32768, 8, 0.95),
    ("byted", 256, 8192, 4, 0.95),
    ("github", 256, 32768, 8, 0.95),
]


@pytest.mark.parametrize(("preset", "ranks", "capacity", "stages", "least"), PRESETS)
def test_balance_on_presets(
    preset: str, ranks: int, capacity: int, stages: int, least: float
) -> None:
    longest = min(2 * 2**20, ranks * capacity)
    lengths = preset_lengths(preset, num_tokens=4 * ranks * capacity, max_length=longest)
    balanced = made_of(lengths, ranks, capacity, stages, max_length=longest)
    result = evaluate(balanced, LLAMA_7B, stages)
    assert balanced.summary["makespan_s"] == pytest.approx(result.makespan_s, rel=1e-9)
    goal = max(result.pipeline_bound_s, result.lower_bound_s)
    assert goal / result.makespan_s > least


@pytest.mark.parametrize(("virtual_stages", "least"), [(1, 0.76), (4, 0.9)])
def test_micro_batches_of_short_sequences_are_as_small_as_the_ramp_wants(
    virtual_stages: int, least: float
) -> None:
    """Full ones would leave eight stages waiting half of the time."""
    lengths = np.random.default_rng(1).lognormal(6.5, 1.2, size=4200).astype(np.int64) + 32
    balanced = made_of(np.minimum(lengths, 131072), 16, 32768, 8, virtual_stages=virtual_stages)
    assert evaluate(balanced, LLAMA_7B, 8, virtual_stages).efficiency > least


@pytest.mark.parametrize(
    ("preset", "ranks", "capacity"), [("github", 64, 32768), ("byted", 96, 8192)]
)
def test_more_virtual_stages_are_not_slower(preset: str, ranks: int, capacity: int) -> None:
    longest = min(2**20, ranks * capacity)
    lengths = preset_lengths(preset, num_tokens=6 * ranks * capacity, max_length=longest, seed=5)
    seconds = []
    for virtual_stages in (1, 2, 3, 4, 6, 12):
        balanced = made_of(
            lengths, ranks, capacity, 2, max_length=longest, virtual_stages=virtual_stages
        )
        seconds.append(evaluate(balanced, LLAMA_7B, 2, virtual_stages).makespan_s)
    assert seconds[1] < 0.97 * seconds[0]
    assert all(after < 1.01 * before for before, after in itertools.pairwise(seconds[1:]))


def test_equal_sequences_reach_the_target() -> None:
    balanced = made_of([100] * 64, 8, 100, 4, cost_model=FREE_NETWORK)
    result = evaluate(balanced, FREE_NETWORK, 4)
    assert result.makespan_s == pytest.approx(800 / 4 + 3 / 4 * 100)


def test_a_slow_rank_gets_less() -> None:
    speeds = [1.0] * 15 + [0.5]
    lengths = np.random.default_rng(0).integers(20, 100, size=600)
    balanced = made_of(lengths, 16, 100, 4, cost_model=FREE_NETWORK, rank_speeds=speeds)
    degrees = np.diff(balanced.rank_offsets)
    of_each = np.add.reduceat(lengths[balanced.sequences], balanced.sequence_offsets[:-1]) / degrees
    tokens = np.bincount(balanced.ranks, weights=np.repeat(of_each, degrees))
    assert tokens[15] < 0.6 * tokens[:15].mean()
    cost_model = CostModel(a=0.0, b=1.0, kv_bytes_per_token=0.0, rank_speeds=tuple(speeds))
    result = evaluate(balanced, cost_model, 4)
    assert result.pipeline_bound_s / result.makespan_s > 0.97
    assert balanced.summary["efficiency"] == pytest.approx(result.efficiency)


def test_more_effort_is_not_slower() -> None:
    lengths = preset_lengths("byted", num_tokens=4 * 64 * 8192, max_length=64 * 8192, seed=3)
    arguments = {"ranks": 64, "tokens_per_rank": 8192, "pipeline_stages": 4}
    one, four = (plan(lengths, effort=effort, **arguments) for effort in (1, 4))
    assert one.strategy == "pp-balance"
    assert four.summary["makespan_s"] <= one.summary["makespan_s"] * 1.001


def test_too_few_short_sequences_to_stand_between_rings() -> None:
    made_of([30, 25, 21, 18, 5], 4, 10, 4, max_length=31)


def test_a_time_that_is_rounded_leaves_every_ring_its_least_degree():
    """The least degrees of a round fill all ranks: one more, by a quotient, is one too many."""
    lengths = [256, 236, 156, 429, 10, 7, 9, 16, 19, 7, 5, 14, 7]
    made_of(lengths, 12, 37, 2, slice_multiple=3, cost_model=COST_MODELS["launch-bound"])

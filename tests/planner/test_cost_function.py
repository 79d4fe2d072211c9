"""A cost model made of a function of the length."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from megatron_hdp.planner import LLAMA_7B, CostModel, plan
from megatron_hdp.planner.bounds import compute_s

Lengths = np.ndarray[tuple[int], np.dtype[np.int64]]
LONGEST = 1_000_003


def squares(lengths: Lengths) -> Any:
    return LLAMA_7B.a * lengths.astype(np.float64) ** 2 + LLAMA_7B.b * lengths


def window(lengths: Lengths) -> Any:
    """Attention of the 4,096 tokens before each, 20 microseconds for the launch."""
    s = lengths.astype(np.float64)
    inside = np.minimum(s, 4096)
    return 2e-5 + 1e-4 * s + 1e-8 * inside * (2 * s - inside)


def root(lengths: Lengths) -> Any:
    return np.sqrt(lengths)


def steps(lengths: Lengths) -> Any:
    """What a kernel takes that pads to 128 tokens."""
    return -(-lengths // 128) * 5


@pytest.mark.parametrize("cost", [squares, window, root])
def test_compute_is_that_of_the_function(cost: Callable[[Lengths], Any]) -> None:
    model = LLAMA_7B.with_costs(cost, LONGEST)
    assert 100 < len(model.attention_points) < 800
    lengths = np.unique(np.geomspace(1, LONGEST, 20_011).astype(np.int64))
    expected = np.asarray(cost(lengths))
    assert np.abs(compute_s(lengths, model) / expected - 1).max() < 1e-3
    sampled = np.array([length for length, _ in model.attention_points])
    assert sampled[[0, 63, -1]].tolist() == [1, 64, LONGEST]
    assert compute_s(sampled, model) == pytest.approx(np.asarray(cost(sampled)), rel=1e-12)
    seconds = [seconds for _, seconds in model.attention_points]
    assert min(seconds) >= 0 and seconds == sorted(seconds)


def test_what_every_token_costs_is_not_attention() -> None:
    model = LLAMA_7B.with_costs(squares, LONGEST)
    assert model.a == 0
    assert model.b == pytest.approx(LLAMA_7B.b, rel=1e-4)
    assert model.attention_points[-1][1] == pytest.approx(LLAMA_7B.a * LONGEST**2, rel=1e-4)
    assert model.attention_table.rises_per_token
    linear = LLAMA_7B.with_costs(lambda lengths: 3 * lengths, 500)
    assert linear.b == 3
    assert {seconds for _, seconds in linear.attention_points} == {0.0}
    assert LLAMA_7B.with_costs(steps, 5000).b == 0
    # a launch of 20 microseconds is attention: 1 token takes more of it a token than 2
    assert not LLAMA_7B.with_costs(window, 5000).attention_table.rises_per_token


def test_the_other_coefficients_stay() -> None:
    before = dataclasses.replace(LLAMA_7B, g=0.5, ranks_per_node=3, rank_speeds=(1.0, 0.5))
    after = before.with_costs(squares, 100)
    changed = {"a", "b", "attention_points"}
    for field in dataclasses.fields(CostModel):
        same = getattr(before, field.name) == getattr(after, field.name)
        assert same == (field.name not in changed), field.name
    again = after.with_costs(squares, 100)
    assert again == after


@pytest.mark.parametrize("max_length", [1, 2, 64, 65, 66, 67, 1000])
def test_the_longest_is_sampled_and_lengths_ascend(max_length: int) -> None:
    seen: list[Lengths] = []

    def cost(lengths: Lengths) -> Lengths:
        seen.append(lengths.copy())
        lengths *= 0  # the function may do what it likes with its array
        return seen[0]

    model = LLAMA_7B.with_costs(cost, max_length)
    assert len(seen) == 1 and seen[0].dtype == np.int64
    assert seen[0].tolist() == [length for length, _ in model.attention_points]
    assert seen[0][-1] == max_length and (np.diff(seen[0]) > 0).all()


def test_plans_with_it_are_those_of_its_formula() -> None:
    rng = np.random.default_rng(3)
    lengths = np.minimum(rng.lognormal(7, 1.6, 900).astype(np.int64) + 1, 16 * 8192)
    arguments = {"ranks": 16, "tokens_per_rank": 8192}
    for strategy in ("static", "naive", "bytescale", "dp-balance"):
        ours, theirs = (
            plan(lengths, strategy=strategy, cost_model=model, **arguments).summary
            for model in (LLAMA_7B.with_costs(squares, 16 * 8192), LLAMA_7B)
        )
        for key in ("makespan_s", "lower_bound_s", "efficiency"):
            assert ours[key] == pytest.approx(theirs[key], rel=2e-3), (strategy, key)


def changed(length: int, seconds: object) -> Callable[[Lengths], Any]:
    def cost(lengths: Lengths) -> Any:
        return [seconds if one >= length else float(one) for one in lengths.tolist()]

    return cost


@pytest.mark.parametrize(
    ("cost", "message"),
    [
        (lambda s: 1.0, r"returned float64 of shape \(\); expected numbers of shape \(96,\): the"),
        (lambda s: s[:-1], r"returned int64 of shape \(95,\); expected numbers of shape \(96,\)"),
        (lambda s: np.ones((2, len(s))), r"returned float64 of shape \(2, 96\)"),
        (lambda s: [str(one) for one in s], r"returned <U3 of shape \(96,\); expected numbers"),
        (lambda s: [None] * len(s), r"returned object of shape \(96,\)"),
        (lambda s: None, r"returned object of shape \(\)"),
        (lambda s: s > 0, r"returned bool of shape \(96,\)"),
        (lambda s: [[1.0], [1.0, 2.0]], "returned a list of which numpy makes no array; expected"),
        (lambda s: s * 1j, r"returned complex128 of shape"),
        (changed(20, float("nan")), "returned nan s for 20 tokens; expected a finite number >= 0"),
        (changed(67, float("inf")), "returned inf s for 68 tokens; expected a finite number >= 0"),
        (changed(1, -2.0), "returned -2.0 s for 1 tokens; expected a finite number >= 0"),
        (changed(30, 7.0), "returned 7.0 s for 30 tokens; expected at least 29.0 s, which a short"),
    ],
)
def test_a_wrong_function(cost: Callable[[Lengths], Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"the cost function {message}"):
        LLAMA_7B.with_costs(cost, 140)


@pytest.mark.parametrize("max_length", [0, -5, 2.0, True, 2**40 + 1, None])
def test_a_wrong_length(max_length: object) -> None:
    with pytest.raises(ValueError, match="^max_length is .*; expected an integer from 1 to 1,099"):
        LLAMA_7B.with_costs(squares, max_length)

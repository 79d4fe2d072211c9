"""Work in runs of micro-batches gives what work on all of them at once gives."""

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

from megatron_hdp.planner import LLAMA_7B, Evaluation, Plan, evaluate, figures, validation
from megatron_hdp.planner import bounds as bounds_module
from megatron_hdp.planner import flat_plan as flat_plan_module
from tests.planner.problems import EXECUTED_STRATEGIES, Problem, fixed_problems
from tests.planner.test_validation import FAULTS, caught_and_named


@pytest.fixture(params=[1, 13])
def small_pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (flat_plan_module, validation):
        monkeypatch.setattr(module, "PIECE", request.param)
    yield


def arrays(evaluation: object) -> dict[str, np.ndarray]:
    return {name: np.asarray(value) for name, value in vars(evaluation).items()}


def assert_same(one: object, other: object) -> None:
    others = arrays(other)
    for name, values in arrays(one).items():
        np.testing.assert_array_equal(values, others[name], err_msg=name, strict=True)


@pytest.fixture(scope="module")
def evaluated() -> list[tuple[Problem, Plan, Evaluation]]:
    """Plans with their evaluations in one piece."""
    plans = [
        (problem, problem.plan(strategy))
        for problem in fixed_problems()[::9]
        for strategy in EXECUTED_STRATEGIES
    ]
    return [(problem, made, evaluate(made, problem.model)) for problem, made in plans]


def test_evaluation(evaluated: list[tuple[Problem, Plan, Evaluation]], small_pieces: None) -> None:
    for problem, made, whole in evaluated:
        made.validate(num_layers=problem.model.num_layers)
        assert_same(whole, evaluate(made, problem.model))


def test_figures_are_those_of_the_evaluation(
    evaluated: list[tuple[Problem, Plan, Evaluation]],
) -> None:
    for problem, made, whole in evaluated:
        found = figures(made, problem.model)
        assert not isinstance(found, Evaluation)
        assert_same(found, whole)
        assert (found.efficiency, found.idle_share) == (whole.efficiency, whole.idle_share)


def test_figures_of_pipelines() -> None:
    problem = fixed_problems()[0]
    made = problem.plan("pp-balance", pipeline_stages=2)
    assert_same(figures(made, problem.model, 2), evaluate(made, problem.model, 2))
    with pytest.raises(ValueError, match="pipeline_stages is 0; expected at least 1"):
        figures(made, problem.model, 0)


@pytest.mark.parametrize(("rule", "change", "message"), FAULTS, ids=lambda value: str(value)[:40])
def test_what_is_wrong_is_named(
    small_pieces: None, rule: str, change: dict[str, object], message: str
) -> None:
    caught_and_named(rule, change, message)


@pytest.mark.parametrize("size", [0, 1, 8, 127, 128, 129, 1000, 4099])
def test_the_sum_of_pieces_is_the_sum(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.random.default_rng(size).integers(1, 2**20, size)
    model = dataclasses.replace(LLAMA_7B, b=0.1)
    monkeypatch.setattr(bounds_module, "PIECE", 128)
    expected = float(bounds_module.compute_s(lengths, model).sum())
    assert bounds_module.total_compute_s(lengths, model) == expected

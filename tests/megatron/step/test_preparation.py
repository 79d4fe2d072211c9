"""A step longer than communicators wait is warned of, once, with the remedy."""

from dataclasses import replace
from unittest import mock

import pytest

from megatron_hdp.megatron.step import preparation
from megatron_hdp.planner import CostModel
from megatron_hdp.training.loop import pretrain
from tests.support.gradients import tiny_arguments, write_corpus


@pytest.fixture
def said(monkeypatch):
    lines = []
    monkeypatch.setattr(preparation, "say", lines.append)
    return lines


def test_short_steps_are_not_told(said):
    one = preparation.LongStepWarning(10)
    one.check(0.0, "is planned to take")
    one.check(299.9, "took")
    assert not said


def test_a_long_step_is_told_once(said):
    one = preparation.LongStepWarning(10)
    one.check(900.0, "is planned to take")
    one.check(900.0, "took")
    (line,) = said
    assert "a step is planned to take 900 s" in line
    assert "found --distributed-timeout-minutes 10, expected at least 31" in line
    again = preparation.LongStepWarning(31)
    again.check(900.0, "took")
    assert len(said) == 1, "what is expected is enough"


def trained(arguments):
    """Body of a rank: what it was told."""
    lines = []
    with mock.patch.object(preparation, "say", lines.append):
        pretrain(arguments)
    return lines


def test_a_run_looks_at_the_plan_of_its_first_step(run_ranks, tmp_path):
    slow = CostModel(a=1.0, b=1.0, kv_bytes_per_token=1.0)
    (tmp_path / "slow.json").write_bytes(slow.to_json())
    arguments = tiny_arguments(write_corpus(tmp_path, [30, 20, 10]), train_iters=2)
    found = run_ranks(1, trained, replace(arguments, hdp_cost_model=tmp_path / "slow.json"))
    ((line,),) = found
    assert line.startswith("warning: a step is planned to take 1,460 s")
    assert "expected at least 50" in line

"""A step that takes longer than a communicator waits is told, once, with what to do about it."""

from dataclasses import replace
from unittest import mock

import pytest

from megatron_hdp.megatron.step import patience
from megatron_hdp.planner import CostModel
from megatron_hdp.training.loop import pretrain
from tests.support.gradients import tiny_arguments, write_corpus


@pytest.fixture
def said(monkeypatch):
    lines = []
    monkeypatch.setattr(patience, "say", lines.append)
    return lines


def test_short_steps_are_not_told(said):
    one = patience.Patience(10)
    one.check(0.0, "is planned to take")
    one.check(299.9, "took")
    assert not said


def test_a_long_step_is_told_once(said):
    one = patience.Patience(10)
    one.check(900.0, "is planned to take")
    one.check(900.0, "took")
    (line,) = said
    assert "a step is planned to take 900 s" in line
    assert "found --distributed-timeout-minutes 10, expected at least 31" in line
    again = patience.Patience(31)
    again.check(900.0, "took")
    assert len(said) == 1, "what is expected is enough"


def trained(arguments):
    """Body of a rank: what it was told."""
    lines = []
    with mock.patch.object(patience, "say", lines.append):
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

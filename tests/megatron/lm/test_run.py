"""When a step's metrics get their validation loss in Megatron's loop, which evaluates after it."""

import json
from types import SimpleNamespace

import pytest

from megatron_hdp.megatron.lm.run import LmRun
from megatron_hdp.training import step_outputs
from megatron_hdp.training.metrics import MetricsLogger
from tests.training.test_metrics import REPORT, replace


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run whose steps are what the test says; it validates every second one, by three batches."""
    monkeypatch.setattr(step_outputs.dist, "get_world_size", lambda: 1)
    outputs = step_outputs.StepOutputs.__new__(step_outputs.StepOutputs)
    outputs.__dict__ |= {"_to_validate": None, "_tracer": None, "_writes": True}
    outputs._arguments = SimpleNamespace(hdp_plot_step=None)
    outputs._flops = SimpleNamespace(of_batch=lambda tokens, squared_tokens: 1.0)
    outputs._logger = MetricsLogger(tmp_path / "metrics.jsonl")
    run = LmRun.__new__(LmRun)
    run.args = SimpleNamespace(do_valid=1, eval_interval=2, eval_iters=3)
    run._job = SimpleNamespace(timeline=SimpleNamespace(settle=lambda: None))
    run.log = SimpleNamespace(latest=REPORT)
    run.__dict__ |= {"_outputs": outputs, "_validated": [], "_began_at": 0.0}
    run._steps = {"train": SimpleNamespace(is_over=lambda position: False)}
    return run


def lines(tmp_path):
    return [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]


def test_the_mean_over_an_evaluation_goes_to_the_step_before(run, tmp_path):
    batches = [replace(REPORT, loss=loss, loss_tokens=n) for loss, n in ((1, 10), (2, 30), (5, 60))]
    for step in range(1, 5):
        run.end_step(step, None, 0.1)
        assert [line["step"] for line in lines(tmp_path)] == list(range(1, step + 1))
        if step % 2 == 0:
            for number, batch in enumerate(batches):
                assert lines(tmp_path)[-1]["validation_loss"] is None, number
                run._add_validation(replace(batch, loss=batch.loss * step))
    for batch in batches:  # once more, when training is over
        run._add_validation(batch)
    found = [line["validation_loss"] for line in lines(tmp_path)]
    assert found == [None, pytest.approx(2 * 3.7), None, pytest.approx(4 * 3.7)]


def test_without_validation_lines_are_written_as_they_are(run, tmp_path):
    run.args.do_valid = 0
    run.end_step(2, None, 0.1)
    assert b" \n" not in (tmp_path / "metrics.jsonl").read_bytes()

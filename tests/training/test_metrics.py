"""Metrics files stay valid JSON, survive restarts and never hold a step twice."""

import json
import math
from dataclasses import replace

import pytest

from megatron_hdp.training.metrics import MetricsLogger, StepMetrics, log_line

STEP = StepMetrics(
    step=3,
    loss=2.5,
    grad_norm=0.75,
    learning_rate=1e-3,
    tokens=1000,
    loss_tokens=990,
    sequences=10,
    consumed_sequences=30,
    consumed_tokens=900,
    seconds=0.5,
    tokens_per_second=2000.0,
    planned_efficiency=0.9,
    measured_efficiency=0.8,
    ring_bytes=5_000_000,
    planning_ms=1.25,
    micro_batches_min=1,
    micro_batches_max=4,
)


def _write(path, steps, **options) -> None:
    with MetricsLogger(path, **options) as logger:
        for step in steps:
            logger.write(replace(STEP, step=step))


def _steps(path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_each_step_is_on_disk_when_write_returns(tmp_path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    logger = MetricsLogger(path)
    logger.write(STEP)
    record = json.loads(path.read_text())
    logger.close()
    assert record["loss"] == 2.5
    assert record["micro_batches_max"] == 4
    assert "non_finite" not in record


def test_a_fresh_run_replaces_and_a_resumed_one_continues(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, [1, 2, 3, 4])
    _write(path, [3, 4, 5], first_step=3)
    assert _steps(path) == [1, 2, 3, 4, 5]
    _write(path, [1])
    assert _steps(path) == [1]


def test_a_line_cut_short_by_a_crash_is_dropped(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, [1, 2])
    path.write_bytes(path.read_bytes() + b'{"step": 3, "lo')
    _write(path, [3], first_step=3)
    assert _steps(path) == [1, 2, 3]


def test_a_file_of_something_else_is_not_overwritten(tmp_path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("precious\n")
    with pytest.raises(ValueError, match="move it away"):
        MetricsLogger(path)
    assert path.read_text() == "precious\n"


def test_nan_is_null_and_named() -> None:
    record = json.loads(replace(STEP, loss=math.nan, grad_norm=math.inf).to_json())
    assert record["loss"] is None
    assert record["non_finite"] == ["loss", "grad_norm"]


def test_the_log_line_has_hdp_figures_only_with_hdp() -> None:
    line = log_line(STEP, 20)
    assert line.startswith(" iteration        3/      20 | consumed samples:        30 |")
    assert "| lm loss: 2.500000E+00 | grad norm: 0.750 |" in line
    assert "| ring traffic (MB): 5.0 |" in line
    assert line.endswith("| micro-batches: 1-4 |")
    plain = replace(STEP, planned_efficiency=None, measured_efficiency=None, ring_bytes=None)
    plain = replace(plain, planning_ms=None, micro_batches_min=None, micro_batches_max=None)
    assert log_line(plain, 20).endswith("| grad norm: 0.750 |")


def test_tensorboard_gets_the_scalars(tmp_path) -> None:
    pytest.importorskip("tensorboard", reason="pip install 'megatron-hdp[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsLogger(None, tmp_path) as logger:
        logger.write(STEP)
    events = EventAccumulator(str(tmp_path)).Reload()
    (loss,) = events.Scalars("loss")
    assert (loss.step, loss.value) == (3, 2.5)
    assert "validation-loss" not in events.Tags()["scalars"]

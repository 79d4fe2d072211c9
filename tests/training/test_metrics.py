"""Metrics files stay valid JSON, survive restarts and never hold a step twice."""

import ast
import inspect
import json
import math
import os
import time
from contextlib import closing
from dataclasses import MISSING, fields, replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist

from megatron_hdp.data.mixture import Position
from megatron_hdp.data.steps import LocalLoaders
from megatron_hdp.megatron.execution.executor import HdpExecutor
from megatron_hdp.megatron.lm.log import hdp_line
from megatron_hdp.megatron.options import model_shape
from megatron_hdp.megatron.step.figures import SourceFigures, StepReport
from megatron_hdp.training.loop import pretrain
from megatron_hdp.training.metrics import MetricsLogger, StepMetrics, log_line
from tests.support.gradients import write_corpus
from tests.training.runs import lines_of, run

PLAIN = {  # what every step has
    **{"loss": 2.5, "tokens": 1000, "loss_tokens": 990, "sequences": 10},
    **{"grad_norm": 0.75, "learning_rate": 1e-3, "step": 3, "seconds": 0.5},
    **{"consumed_sequences": 30, "consumed_tokens": 900, "tokens_per_second": 2000.0},
    **{"model_flops_per_second": 4.921e12, "model_flops_per_second_per_rank": 1.23025e12},
}
STEP = StepMetrics(
    **PLAIN,
    **{"planned_efficiency": 0.9, "measured_efficiency": 0.8, "makespan_s": 0.4},
    **{"idle_share_max": 0.45, "idle_share_mean": 0.2, "ring_wait_s": 0.05, "sync_s": 0.0123},
    **{"pipeline_wait_s": 0.0, "ring_bytes": 5_000_000, "planning_ms": 1.25, "data_wait_ms": 1.5},
    **{"micro_batches_min": 1, "micro_batches_max": 4},
)


def _write(path, steps, **options) -> None:
    with closing(MetricsLogger(path, **options)) as logger:
        for step in steps:
            logger.write(replace(STEP, step=step))


def _steps(path) -> list[int]:
    return [line["step"] for line in lines_of(path)]


def test_a_fresh_run_replaces_and_a_resumed_one_continues(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, [1, 2, 3, 4])
    _write(path, [3, 4, 5], first_step=3)
    assert _steps(path) == [1, 2, 3, 4, 5]
    _write(path, [1])
    assert _steps(path) == [1]


@pytest.mark.parametrize(
    "end", [b"\n", b" \n\n", b"\r\n", b"\0\0\0", b'{"step": 3, "lo\n', b'{"step": 3, "lo']
)
def test_blank_lines_and_what_a_crash_cut_short_are_dropped(tmp_path, end) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, [1, 2])
    path.write_bytes(b"\n" + path.read_bytes() + end)
    _write(path, [3], first_step=3)
    assert _steps(path) == [1, 2, 3]


@pytest.mark.parametrize("text", ["precious\n", "precious", '{"step": 1}\n{"a": 2}\n', "[1]\n"])
def test_a_file_of_something_else_is_not_overwritten(tmp_path, text) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match="move it away"):
        MetricsLogger(path, first_step=5)
    assert path.read_text() == text


def test_a_path_that_cannot_be_written_is_refused_at_once(tmp_path) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    for path, reason in (
        (tmp_path, "found a folder"),
        (tmp_path / "pipe", "found a device or a pipe"),
        (tmp_path / "file" / "metrics.jsonl", "not a folder"),
        (tmp_path / "file" / "deep" / "metrics.jsonl", "not a folder"),
    ):
        with pytest.raises(ValueError, match=reason) as caught:
            MetricsLogger(path)
        assert f"--metrics-path {path}" in str(caught.value)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file", "pipe"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's full device")
def test_a_full_disk_is_named(tmp_path) -> None:
    with (
        mock.patch("megatron_hdp.training.metrics._new_file", lambda *_: open("/dev/full", "r+b")),
        closing(MetricsLogger(tmp_path / "metrics.jsonl")) as logger,
        pytest.raises(ValueError, match=r"metrics\.jsonl cannot be written \(No space left"),
    ):
        logger.write(STEP)


@pytest.mark.parametrize("loss", [2.25, 1.0000000000000002e-300, math.nan])
def test_a_line_is_completed_in_its_place(tmp_path, loss) -> None:
    """Whenever the process is killed, the step is there; who reads along sees whole lines only."""
    path = tmp_path / "new" / "metrics.jsonl"
    with closing(MetricsLogger(path)) as logger:
        logger.write(replace(STEP, step=1))
        (record,) = lines_of(path)
        assert (record["loss"], record["micro_batches_max"]) == (2.5, 4)
        assert "non_finite" not in record
        logger.write(replace(STEP, step=2, loss=math.nan), to_validate=[])
        before = path.read_bytes()
        assert _steps(path) == [1, 2] and json.loads(before.splitlines()[1])["loss"] is None
        logger.complete(replace(STEP, step=2, loss=math.nan, validation_loss=loss))
        assert len(path.read_bytes()) == len(before)
        logger.write(replace(STEP, step=3))
    _write(path, [4], first_step=4)
    lines = lines_of(path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    found = [line["validation_loss"] for line in lines]
    assert found == [None, None if math.isnan(loss) else loss, None, None]
    non_finite = ["loss", "validation_loss"] if math.isnan(loss) else ["loss"]
    assert lines[1]["non_finite"] == non_finite


def test_a_line_has_room_for_sources_that_training_does_not_have(tmp_path) -> None:
    losses = {f"held out, number {number}": -1.2345678901234567e-300 for number in range(20)}
    step = replace(STEP, sources=None)
    with closing(MetricsLogger(tmp_path / "metrics.jsonl")) as logger:
        logger.write(step, to_validate=list(losses))
        logger.complete(replace(step, validation_loss=1.0, validation_sources=losses))
    (line,) = lines_of(tmp_path / "metrics.jsonl")
    assert line["validation_sources"] == losses


def test_nan_is_null_and_named() -> None:
    record = json.loads(replace(STEP, loss=math.nan, grad_norm=math.inf).to_json())
    assert record["loss"] is None
    assert record["non_finite"] == ["loss", "grad_norm"]


def test_the_log_line_has_hdp_figures_only_with_hdp() -> None:
    line = log_line(STEP, 20)
    assert line.startswith(
        " iteration        3/      20 | consumed samples:        30 | "
        "elapsed time per iteration (ms): 500.0 | throughput per GPU (TFLOP/s/GPU): 1.23 | "
    )
    assert "| grad norm: 0.750 | lm loss: 2.500000E+00 | sequences: 10 |" in line
    assert "| idle share mean: 0.200 | idle share max: 0.450 | ring wait (ms): 50.0 |" in line
    assert "| gradient sync (ms): 12.3 | ring traffic (MB): 5.0 |" in line
    assert line.endswith("| planning (ms): 1.25 | data wait (ms): 1.50 | micro-batches: 1-4 |")
    assert {item.name for item in fields(StepMetrics) if item.default is MISSING} == PLAIN.keys()
    assert log_line(StepMetrics(**PLAIN), 20).endswith("| sequences: 10 | tokens: 1,000 |")


TROUBLED = {
    "mtp loss: 1.000000E+01": {"mtp_loss": 10.0},
    "skipped documents: 2": {"skipped_documents": 2},
    "planner failures: 1": {"planner_failures": 1},
    "stragglers: 1": {"slow_ranks": 1},
    "pipeline wait (ms): 250.0": {"pipeline_wait_s": 0.25},
    "padding (%): 12.5": {"padding_share": 0.125},
    "loss (share) by source: a 2.0000 (0.250), b - (0.750)": {
        "sources": {
            name: SourceFigures(tokens=1, loss_tokens=1, loss=loss, share=share, epoch=0, bad=0)
            for name, loss, share in (("a", 2.0, 0.25), ("b", None, 0.75))
        }
    },
}


def test_both_log_lines_show_equal_figures() -> None:
    for text, figures in TROUBLED.items():
        step = replace(STEP, **figures)
        assert f" | {text} |" in log_line(step, 20)
        assert text.split(":")[0] not in log_line(STEP, 20)
        # the plugin's line follows Megatron's, which has the loss
        in_plugin = hdp_line(3, step).split("iteration 3: ")[1]
        assert log_line(step, 20).endswith(f"lm loss: 2.500000E+00 | {in_plugin}")


ROOMS = [Path(inspect.getfile(room)).parent for room in (StepReport, StepMetrics)]


def never_set(source: str) -> set[str]:
    """Declared figures that no call in the source has an argument for."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    given = {argument.arg for call in calls for argument in call.keywords}
    return {item.name for item in fields(StepMetrics)} - given


def test_every_declared_figure_is_set_and_no_other_one() -> None:
    source = "".join(path.read_text() for room in ROOMS for path in sorted(room.glob("*.py")))
    assert never_set(source) == set()
    assert never_set(source.replace("mtp_loss=", "other=")) == {"mtp_loss"}
    with pytest.raises(TypeError, match="not_declared"):
        replace(REPORT, not_declared=1.0)


REPORT = StepReport(
    loss=2.5,
    tokens=1000,
    squared_tokens=50_000,
    seen_in_window=50_000,
    loss_tokens=990,
    sequences=10,
    position_after=Position(sequences=30),
    micro_batches_min=1,
    micro_batches_max=4,
    idle_share_max=0.45,
    skipped_documents=3,
)


def test_a_report_becomes_metrics() -> None:
    metrics = StepMetrics.of_report(
        REPORT,
        seconds=0.5,
        model_flops=1e12,
        num_ranks=8,
        step=3,
        consumed_tokens=3000,
        grad_norm=0.75,
        learning_rate=1e-3,
    )
    assert (metrics.tokens_per_second, metrics.consumed_sequences) == (2000.0, 30)
    assert metrics.model_flops_per_second == 2e12
    assert metrics.model_flops_per_second_per_rank == 2.5e11
    assert (metrics.idle_share_max, metrics.skipped_documents) == (0.45, 3)
    assert metrics.idle_share_mean is None
    # what a step reports and the metrics leave out is on purpose
    missing = {item.name for item in fields(StepReport)} - {i.name for i in fields(StepMetrics)}
    kept = {"squared_tokens", "seen_in_window", "encoder_flop", "position_after", "non_finite"}
    assert missing == kept
    assert json.loads(STEP.to_json()).keys() == {item.name for item in fields(StepMetrics)}


def measured(arguments):
    """Body of a rank: the metrics of every step; rank 2 plans and computes slowly."""
    prepare, forward_step = LocalLoaders.prepare, HdpExecutor._forward_step

    def prepare_late(self, position):
        time.sleep(0.05 * dist.get_rank())
        return prepare(self, position)

    def forward_late(self, *call):
        time.sleep(0.3 if dist.get_rank() == 2 else 0)
        return forward_step(self, *call)

    with (
        mock.patch.object(LocalLoaders, "prepare", prepare_late),
        mock.patch.object(HdpExecutor, "_forward_step", forward_late),
    ):
        return pretrain(arguments)


@pytest.fixture(scope="module")
def three_ranks(run_ranks, tmp_path_factory):
    """Two steps on three ranks, of a sequence for all of them and some for one."""
    folder = tmp_path_factory.mktemp("metrics")
    lengths = [300, 700, 10, 20, 30]
    longest = dict.fromkeys(("seq_length", "max_position_embeddings"), max(lengths))
    settings = longest | {"hdp_tokens_per_rank": 300, "global_batch_size": len(lengths)}
    arguments = run(write_corpus(folder, lengths), steps=2, **settings)
    return lengths, arguments, run_ranks(3, measured, arguments)


def test_flops_and_idle_shares_of_a_run(three_ranks) -> None:
    lengths, arguments, found = three_ranks
    per_step = model_shape(arguments, 257).flops(np.array(lengths))
    for metrics in found[0]:
        assert metrics.model_flops_per_second == pytest.approx(per_step / metrics.seconds)
        per_rank = metrics.model_flops_per_second_per_rank
        assert 3 * per_rank == pytest.approx(metrics.model_flops_per_second)
        assert 0 <= metrics.idle_share_mean <= metrics.idle_share_max < 1
        assert metrics.idle_share_mean == pytest.approx(1 - metrics.measured_efficiency)
        # no rank is idler than all are together
        assert metrics.idle_share_max <= 3 * metrics.idle_share_mean
        assert 0 < metrics.makespan_s < metrics.seconds
        assert 0 < metrics.ring_wait_s < metrics.makespan_s and metrics.pipeline_wait_s == 0
        assert 0 < metrics.sync_s < metrics.seconds
        idle_s = metrics.idle_share_mean * metrics.makespan_s
        assert idle_s >= metrics.ring_wait_s - 1e-9


def test_figures_are_alike_on_all_ranks_and_the_slowest_plans(three_ranks) -> None:
    _, _, found = three_ranks
    own = ("seconds", "planning_ms")
    for name in (item.name for item in fields(StepMetrics)):
        if not name.startswith(own) and "_per_second" not in name:
            values = [[getattr(m, name) for m in metrics] for metrics in found]
            assert values == values[:1] * len(found), name
    assert all(metrics[0].data_wait_ms >= 100 for metrics in found)


def test_tensorboard_gets_the_scalars(tmp_path) -> None:
    pytest.importorskip("tensorboard", reason="pip install 'megatron-hdp[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with closing(MetricsLogger(None, tmp_path)) as logger:
        logger.write(STEP)
    events = EventAccumulator(str(tmp_path)).Reload()
    (loss,) = events.Scalars("loss")
    assert (loss.step, loss.value) == (3, 2.5)
    assert "validation-loss" not in events.Tags()["scalars"]

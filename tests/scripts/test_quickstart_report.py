"""The quickstart's report shows both runs and fails when their losses differ."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "quickstart_report.py"


def _report(folder: Path, hdp_changes: dict, num_hdp_steps: int = 2):
    step = {
        "loss": 5.5,
        "tokens": 100,
        "tokens_per_second": 1000.0,
        "ring_bytes": 4_000_000,
        "planned_efficiency": 0.5,
        "measured_efficiency": 0.4,
        "planning_ms": 1.0,
        "micro_batches_min": 3,
        "micro_batches_max": 3,
    }
    runs = {"static": ({}, 2), "hdp": (hdp_changes, num_hdp_steps)}
    for name, (changes, num_steps) in runs.items():
        lines = [json.dumps({"step": i + 1} | step | changes) for i in range(num_steps)]
        (folder / name).write_text("\n".join(lines))
    command = [sys.executable, str(SCRIPT), str(folder / "static"), str(folder / "hdp")]
    return subprocess.run(command, capture_output=True, text=True)


def test_equal_losses_give_a_table_of_ratios(tmp_path) -> None:
    changes = {"tokens_per_second": 1500.0, "ring_bytes": 0, "micro_batches_min": 2}
    done = _report(tmp_path, changes | {"loss": 5.50001})
    assert done.returncode == 0
    rows = {line.split("  ")[0]: line.split() for line in done.stdout.splitlines()}
    assert rows["tokens/s (median step)"][-4:] == ["1,000", "1,500", "x", "1.50"]
    assert rows["ring traffic a step (MB)"][-4:] == ["4.0", "0.0", "x", "0.00"]
    assert rows["micro-batches a rank"][-2:] == ["3-3", "2-3"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": 5.51}, "losses differ by 1.8e-03"),
        ({"loss": None}, "cannot be compared"),
        ({"tokens": 99}, "cannot be compared"),
    ],
)
def test_other_losses_or_data_fail(tmp_path, changes: dict, message: str) -> None:
    done = _report(tmp_path, changes)
    assert done.returncode == 1
    assert message in done.stdout + done.stderr


def test_other_steps_or_no_steps_fail(tmp_path) -> None:
    assert "found 2 and 1 steps" in _report(tmp_path, {}, num_hdp_steps=1).stderr
    assert "found no step" in _report(tmp_path, {}, num_hdp_steps=0).stderr

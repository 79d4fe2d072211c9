"""The README's first command, as a user types it, with fewer tokens and steps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_quickstart(folder, *flags, **environment):
    return subprocess.run(
        [ROOT / "scripts/quickstart.sh", *flags],
        env=os.environ | {"PYTHON": sys.executable, "OUT": str(folder)} | environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=580,
    )


@pytest.mark.timeout(600)
def test_quickstart(tmp_path):
    smaller = ["--hdp-global-batch-tokens", "16384", "--hdp-tokens-per-rank", "4096"]
    result = run_quickstart(tmp_path, *smaller, STEPS="2", NPROC="2")
    assert result.returncode == 0, result.stdout + result.stderr
    for line in (
        "loss, step 2",
        "tokens/s",
        "ring traffic",
        "measured efficiency",
        "micro-batches",
    ):
        assert line in result.stdout, result.stdout
    runs = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("static", "hdp")]
    static, hdp = ([json.loads(line) for line in run.splitlines()] for run in runs)
    assert [step["step"] for step in hdp] == [1, 2]
    for a, b in zip(static, hdp, strict=True):
        assert abs(a["loss"] / b["loss"] - 1) < 1e-5
        assert a["ring_bytes"] >= b["ring_bytes"] >= 0
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in (tmp_path / "data").iterdir()} == {"stdlib.bin", "stdlib.idx"}


def test_what_is_missing_is_said_in_one_line(tmp_path):
    result = run_quickstart(tmp_path, PYTHON="/nowhere/python")
    assert result.returncode == 1
    assert result.stderr == "error: PYTHON names no program: give a path to python\n"
    assert list(tmp_path.iterdir()) == []

"""A tiny Qwen3-VL learns to read drawn charts on four ranks, and goes back to transformers."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_tutorial(tmp_path):
    pytest.importorskip("PIL", reason="pip install 'megatron-hdp[media]'")
    pytest.importorskip("matplotlib", reason="pip install 'megatron-hdp[plot]'")
    folder = tmp_path / "out"
    environment = {**os.environ, "PYTHON": sys.executable, "OUT": str(folder)}
    environment |= {"STEPS": "8", "PYTHONPATH": str(ROOT)}
    command = ["bash", str(ROOT / "scripts/charts_qwen.sh")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    runs = {}
    for name, count in (("home", 2), ("seeing", 8)):
        lines = (folder / f"{name}.jsonl").read_text().splitlines()
        runs[name] = [json.loads(line) for line in lines]
        assert len(runs[name]) == count
        assert all(step["media_items"] == 32 for step in runs[name])
    losses = {name: [step["loss"] for step in steps] for name, steps in runs.items()}
    assert losses["home"] == pytest.approx(losses["seeing"][:2], abs=1e-4)  # who encodes is all
    assert losses["seeing"][-1] < losses["seeing"][0] - 1
    for mine, theirs in zip(runs["seeing"], runs["home"], strict=False):
        assert mine["encoder_efficiency"] > theirs["encoder_efficiency"]
    for name in ("home.png", "home-items.png", "step.png", "step-items.png"):
        assert (folder / name).stat().st_size > 5_000
    assert re.search(r"seeing-qwen: Which bar is the highest\? .* of 40 are right", done.stdout)

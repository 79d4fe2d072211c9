"""The tutorial of the data runs as a newcomer runs it, with fewer steps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_tutorial(tmp_path):
    environment = {**os.environ, "PYTHON": sys.executable, "OUT": str(tmp_path / "out")}
    environment |= {"STEPS": "3", "PYTHONPATH": str(ROOT)}
    command = ["bash", str(ROOT / "scripts/tutorial.sh")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr and "sources that are new to this run: 'code'" in (
        done.stdout + done.stderr
    )
    found = {
        name: [
            json.loads(line)
            for line in (tmp_path / f"out/{name}.jsonl").read_text().split("\n")
            if line
        ]
        for name in ("base", "more", "chat")
    }
    steps = {name: [one["step"] for one in lines] for name, lines in found.items()}
    assert steps == {"base": [1, 2, 3], "more": [4, 5, 6], "chat": [1, 2, 3]}
    assert set(found["more"][-1]["sources"]) == {"prose", "code"}
    answers = found["chat"][-1]["sources"]["chat"]
    assert 0 < answers["loss_tokens"] < 0.9 * answers["tokens"]
    table = done.stdout.splitlines()[-6:]
    assert [line.split()[:2] for line in table[:-1]] == [
        ["run", "source"],
        ["base", "prose"],
        ["more", "prose"],
        ["more", "code"],
        ["chat", "chat"],
    ]

"""The script draws a traced step, and says which steps there are when asked for another."""

import json
import subprocess
import sys
from pathlib import Path

from megatron_hdp.simulator.trace_events import write_events
from megatron_hdp.training.step_trace import name_events, step_events
from tests.training.test_trace import ranks_of_two_machines, with_copies

SCRIPT = Path(__file__).parents[3] / "scripts" / "dev" / "plot_trace.py"


def drawn(tmp_path, *step):
    plan, evaluation, ranks = ranks_of_two_machines()
    events = [
        *name_events([rank.place for rank in ranks], offload=True),
        *step_events(ranks, plan, evaluation, 7, 0.0),
        *step_events(with_copies(ranks), plan, evaluation, 8, 10.0),
    ]
    write_events(tmp_path / "trace.json", events, {})
    assert json.loads((tmp_path / "trace.json").read_bytes())["otherData"] == {}
    command = [sys.executable, SCRIPT, tmp_path / "trace.json", tmp_path / "trace.png", *step]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_picture(tmp_path):
    done = drawn(tmp_path, "8")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")


def test_a_step_that_was_not_traced(tmp_path):
    done = drawn(tmp_path, "9")
    assert done.returncode != 0 and "has the steps [7, 8], not 9" in done.stderr

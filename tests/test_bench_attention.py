"""The benchmark of attention runs on a CPU with small shapes, and its tables are whole."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_it_runs_where_there_is_no_gpu():
    command = [sys.executable, "scripts/gpu/bench_attention.py", "--device", "cpu", "--small"]
    done = subprocess.run(
        [*command, "--seconds", "60"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    overheads = [row for row in rows if row[0] == "| torch-sdpa-cpu"]
    assert len(overheads) == 3
    assert all(row[4].endswith("%") and int(row[6].rstrip(" |")) >= 3 for row in overheads)
    groups = {row[0]: float(row[1].replace(",", "")) for row in rows[-2:]}
    assert groups["| light"] < groups["| real"]
    assert "flash-attn is not to be had here: flash-attn: ValueError: found device 'cpu'" in (
        done.stdout
    )

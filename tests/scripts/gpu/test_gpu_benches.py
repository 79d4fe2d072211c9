"""The benchmarks of a GPU run on the CPU, small: each prints its table and says what it ran on."""

from pathlib import Path

import pytest

from tests.support.processes import run_script

SCRIPTS = Path(__file__).parents[3] / "scripts" / "gpu"


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("bench_*.py")), ids=lambda path: path.stem)
def test_a_small_run(script):
    done = run_script(script, "--device", "cpu", "--small")
    assert done.returncode == 0, done.stderr
    assert "CPU, 1 thread(s)" in done.stdout
    rows = [line.split("|") for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(rows) > 2
    assert len({len(row) for row in rows[:3]}) == 1
    assert "out of memory" not in done.stdout


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("bench_*.py")), ids=lambda path: path.stem)
def test_without_a_gpu_it_says_so(script):
    done = run_script(script, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert "found no NVIDIA GPU: give --device cpu --small" in done.stderr

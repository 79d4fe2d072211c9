"""The benchmarks of a GPU run on the CPU, small: each prints its table and says what it ran on."""

from pathlib import Path

import pytest

from tests.support.processes import run_script

SCRIPTS = Path(__file__).parents[3] / "scripts" / "gpu"


SLOW = {"bench_attention", "bench_offload"}
ALL = sorted(path.stem for path in SCRIPTS.glob("bench_*.py"))


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[pytest.mark.slow] * (one in SLOW)) for one in ALL]
)
def test_a_small_run(name):
    done = run_script(SCRIPTS / f"{name}.py", "--device", "cpu", "--small")
    assert done.returncode == 0, done.stderr
    assert "CPU, 1 thread(s)" in done.stdout
    rows = [line.split("|") for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(rows) > 2
    assert len({len(row) for row in rows[:3]}) == 1
    assert "out of memory" not in done.stdout


@pytest.mark.parametrize("name", ALL)
def test_without_a_gpu_it_says_so(name):
    done = run_script(SCRIPTS / f"{name}.py", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert "found no NVIDIA GPU: give --device cpu --small" in done.stderr

"""The benchmark of the data runs, small, and prints what it compares."""

from pathlib import Path

import pytest

from tests.support.processes import run_script

SCRIPT = Path(__file__).parents[3] / "scripts" / "benchmarks" / "bench_data.py"


@pytest.mark.slow
def test_a_small_run():
    small = ("--draws", "50", "--rounds", "3", "--table-up-to", "100", "--step-rows", "1000")
    done = run_script(SCRIPT, "--rows", "20", "1000000", *small)
    assert done.returncode == 0, done.stderr
    _, names, few, many, step, *mixed = done.stdout.splitlines()
    assert names.split() == ["rows", "version", "2", "numpy,", "once"]
    assert few.count(" ms (") == 2 and many.count(" ms (") == 1
    assert step.startswith("a step of about 50 sequences of 1,000: ")
    assert "ms by sequences" in step and "ms by tokens" in step
    numbers = (4, 20, 100)
    assert [line.split(":")[0] for line in mixed] == [f"of {n} sources of 1,000" for n in numbers]


@pytest.mark.slow
def test_a_small_run_of_tables():
    small = ("--draws", "50", "--rounds", "3", "--beside-up-to", "1000")
    done = run_script(SCRIPT, "--tables", "1000", "2000", "--sparse", "5000", *small)
    assert done.returncode == 0, done.stderr
    _, *lines = done.stdout.splitlines()
    found = [line.split() for line in lines]
    ways = [(documents, way) for documents, way, *_ in found]
    assert ways == [
        *(("1,000", way) for way in ("cached", "private", "megatron")),
        ("2,000", "cached"),
        ("5,000", "sparse"),
    ]
    assert [len(cells) for cells in found] == [9, 7, 9, 9, 7]

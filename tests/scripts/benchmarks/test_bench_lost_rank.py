"""The benchmark of kills, small: every job runs, and ranks are killed."""

from pathlib import Path

import pytest

from tests.support.processes import run_script

SCRIPT = Path(__file__).parents[3] / "scripts" / "benchmarks" / "bench_lost_rank.py"


@pytest.mark.slow
def test_a_small_run():
    flags = ("--ranks", "2", "--seconds", "10", "--kill-each", "6")
    done = run_script(SCRIPT, *flags, timeout_s=550)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()[2:]]
    assert [row[:2] for row in rows] == [["never", "0"], ["6 s", "1"]]
    whole, killed = ([int(cell.split()[0]) for cell in row[2:4]] for row in rows)
    assert min(whole) > 0 and killed[0] > 0
    waits = [[float(one.strip("()")) for one in cell.split()] for cell in rows[1][4:]]
    assert all(0 < median <= worst for median, worst in waits) and len(waits) == 2

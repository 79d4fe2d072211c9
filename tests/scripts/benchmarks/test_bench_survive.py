"""The benchmark of what survival costs, small: it knows the threads that work for it."""

import re
from pathlib import Path

import pytest

from tests.support.processes import run_script

SCRIPT = Path(__file__).parents[3] / "scripts" / "benchmarks" / "bench_survive.py"


@pytest.mark.slow
def test_a_small_run():
    flags = ("--ranks", "2", "--blocks", "4", "--block", "3", "--tokens", "4096")
    done = run_script(SCRIPT, *flags, timeout_s=550)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks, 2 steps with copies and 4 without" in done.stdout
    parts = ("sends copies", "keeps copies", "listens", "training thread")
    shares = {
        part: float(re.search(rf"^{part} .*, ([\d.]+)%$", done.stdout, re.MULTILINE)[1])
        for part in parts
    }
    assert all(0 < shares[part] < 50 for part in parts if part != "listens"), done.stdout
    (everything,) = re.findall(r"^all of it +([\d.]+)% ", done.stdout, re.MULTILINE)
    assert max(shares.values()) <= float(everything) <= sum(shares.values()) + 0.02
    assert len(re.findall(r"^in turns.*% with copies, .*% to .*%$", done.stdout, re.MULTILINE)) == 2

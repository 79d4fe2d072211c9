"""The benchmark of verl's steps, small: both strategies run, and learn the same."""

import re
from pathlib import Path

import pytest

from tests.support.processes import run_script
from tests.verl.engines import HOW, is_there

SCRIPT = Path(__file__).parents[3] / "scripts" / "benchmarks" / "bench_verl.py"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_small_run():
    if not is_there():
        pytest.skip(HOW)
    flags = ("--steps", "2", "--tokens", "256", "--hidden", "64", "--layers", "2")
    done = run_script(SCRIPT, *flags, timeout_s=800)
    assert done.returncode == 0, done.stdout + done.stderr
    apart = [float(one) for one in re.findall(r": (\S+) apart at most", done.stdout)]
    assert len(apart) == 3 and max(apart) < 1e-4
    degrees = re.findall(r"degrees of rings (\d) to (\d)", done.stdout)
    assert degrees == [("2", "2"), ("1", "2")]

"""The benchmark of pictures, small: every strategy runs, with the same losses and gradients."""

from pathlib import Path

import pytest

from tests.support.processes import run_script

SCRIPT = Path(__file__).parents[3] / "scripts" / "benchmarks" / "bench_media.py"


@pytest.mark.slow
def test_a_small_run():
    sizes = ("--ranks", "2", "--steps", "1", "--pictures", "3", "--pages", "1", "--texts", "2")
    small = ("--page-side", "32", "--layers", "1", "--width", "32")
    done = run_script(SCRIPT, *sizes, *small, timeout_s=550)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.startswith("attention:")]
    assert [line.split()[0] for line in lines[:4]] == ["home", "replica", "micro-batch", "step"]
    for line, what in zip(lines[4:], ("loss", "norm"), strict=True):
        said, _, difference = line.rpartition(" ")
        assert said.endswith(f"of the {what}:")
        assert float(difference) < 1e-5

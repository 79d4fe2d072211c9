"""The benchmark of pictures runs, small, and prints what it compares."""

from pathlib import Path

import pytest

from tests.support.processes import run_script

SCRIPT = Path(__file__).parents[3] / "scripts" / "benchmarks" / "bench_pictures.py"


@pytest.mark.slow
def test_a_small_run():
    done = run_script(SCRIPT, "--pictures", "3", "--side", "90", "--seconds", "0.01")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(",")[0].split()[0] for line in lines[1:13:2]] == [
        *("JPEG", "PNG", "WEBP", "TIFF", "GIF", "AVIF"),
    ]
    assert lines[-1].endswith(" times as fast, 0.125 of the bytes")

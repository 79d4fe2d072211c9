"""The benchmark of the data plane, small: every measurement runs and compares what it should."""

import re
from pathlib import Path

import pytest

from tests.support.processes import run_script

SCRIPT = Path(__file__).parents[3] / "scripts" / "benchmarks" / "bench_data_plane.py"


def tables(*words):
    """The cells of all tables that a measurement prints; it must end well."""
    pytest.importorskip("ray", reason="pip install 'megatron-hdp[ray]'")
    done = run_script(SCRIPT, *words, timeout_s=550)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.match(r"\d+ CPUs \(\w+\), load \d+ \d+ \d+, Python 3", done.stdout)
    lines = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines], done.stdout


@pytest.mark.slow
def test_memory():
    small = ("--ranks", "2", "--sources", "2", "--state-mb", "10", "--documents", "100")
    (names, _, *rows), text = tables("memory", *small, "--steps", "2")
    assert "of a node: 20.0" in text
    alone, shared = (dict(zip(names, sizes, strict=True)) for sizes in rows)
    for held, num_loaders in ((alone, 2), (shared, 1)):
        assert held["ranks"] == "2" and held["steps"] == "same"
        assert int(held["remote: Loader"]) > 2 * 10 + 20 * num_loaders
        others = ("ranks", "Planner", "Constructor", "host", "Ray")
        assert all(int(held[f"remote: {kind}"]) > 20 for kind in others)
    assert int(shared["remote: Loader"]) < int(alone["remote: Loader"])


@pytest.mark.slow
def test_speed():
    small = ("--sources", "2", "--documents", "40", "--part-mb", "4", "--steps", "1")
    rows, text = tables("speed", *small, "--sources-per-loader", "1", "2")
    assert "medians of 1 steps of" in text
    assert [(cells[0], cells[-1]) for cells in rows[2:]] == [("1", "same"), ("2", "same")]
    assert all(float(cells[1]) > 1 and 0 < float(cells[3]) < 99 for cells in rows[2:])


@pytest.mark.slow
def test_recovery():
    rows, text = tables("recovery", "--kills", "1", "--documents", "100", "--token-us", "5")
    assert "seed 1" in text
    assert [(cells[0], cells[-1]) for cells in rows[2:]] == [
        ("1", "1 kills: same"),
        ("0", "1 kills: same"),
    ]

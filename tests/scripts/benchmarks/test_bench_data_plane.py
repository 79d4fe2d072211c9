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


def test_bytes():
    small = ("--nodes", "1", "2", "--ranks-per-node", "2", "--documents", "100", "--steps", "1")
    (_, _, one, two), _ = tables("bytes", *small, "--sequences", "10")
    assert one[0] == "1 x 2" and two[0] == "2 x 2"
    for cells in (one, two):
        assert 1 < float(cells[3]) <= 1.1 and cells[4] == "<= 1.1"
        assert int(cells[5].rstrip("%")) > 0


def test_planner():
    small = ("--ranks", "16", "--ranks-per-node", "4", "--sequences", "200")
    (_, _, alone), text = tables(
        "planner", *small, "--documents", "2000", "--steps", "2", "--without-ray"
    )
    assert "16 ranks on 4 nodes, 200 sequences a step" in text
    message, share = (int(cell.removesuffix(" B").replace(",", "")) for cell in alone[4:6])
    assert message > 0 and share > 0


@pytest.mark.slow
def test_planner_of_ray():
    small = ("--ranks", "16", "--ranks-per-node", "4", "--sequences", "200")
    (_, _, alone, actor), _ = tables("planner", *small, "--documents", "2000", "--steps", "2")
    assert alone[4] == actor[4]  # the same messages


@pytest.mark.slow
def test_memory():
    small = ("--ranks", "2", "--sources", "2", "--state-mb", "10", "--documents", "100")
    (_, _, ranks, names, _, sizes), text = tables("memory", *small, "--steps", "2")
    assert ranks[0] == "2" and ranks[-1] == "same"
    assert "of a node: 20.0" in text
    held = dict(zip(names, sizes, strict=True))
    assert int(held["Loader"]) > 2 * (10 + 20)
    assert {"Planner", "Constructor", "host", "ray raylet", "ray gcs", "ranks"} <= set(held)
    assert not {"ray client server", "ray web server", "python"} & set(held)


@pytest.mark.slow
def test_start():
    small = ("--head-start", "0", "--rounds", "1", "--sources", "2", "--documents", "100")
    (_, _, cells), _ = tables("start", *small)
    assert cells[0] == "0 s" and cells[2] == "<= 3 s"
    assert float(cells[1].removesuffix(" s")) > 0


@pytest.mark.slow
def test_recovery():
    rows, text = tables("recovery", "--kills", "1", "--documents", "100", "--token-us", "5")
    assert "seed 1" in text
    assert [(cells[0], cells[-1]) for cells in rows[2:]] == [
        ("1", "1 kills: same"),
        ("0", "1 kills: same"),
    ]


@pytest.mark.slow
def test_wait():
    small = ("--steps", "4", "--rounds", "1", "--documents", "100", "--sequences", "6")
    rows, text = tables("wait", *small, "--hidden-size", "16")
    assert len(rows[2:]) == 6 and "losses of all runs: same" in text


@pytest.mark.slow
def test_kills():
    small = ("--seconds", "8", "--every", "2", "--documents", "100", "--token-us", "5")
    rows, text = tables("kills", *small, "--step", "0.1")
    assert [cells[:2] for cells in rows[2:]] == [
        *(["none", "1"], ["loaders", "1"], ["loaders", "0"]),
        *(["loaders, planner, constructor", "1"], ["loaders, planner, constructor", "0"]),
    ]
    assert all(cells[-1] == "same" for cells in rows[2:])
    assert rows[2][2] == "0" and any(int(cells[2]) for cells in rows[3:])
    assert len(re.findall(r"with a shadow over that without: [0-9.]+ x", text)) == 2

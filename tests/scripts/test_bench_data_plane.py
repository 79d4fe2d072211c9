"""The benchmark of the data plane runs, small, and prints what it compares."""

from pathlib import Path

from tests.support.processes import run_script

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_data_plane.py"


def test_a_small_run_of_the_planner():
    small = ("--nodes", "1", "3", "--ranks-per-node", "2", "--sequences", "40", "--rounds", "2")
    done = run_script(SCRIPT, "--planner", *small)
    assert done.returncode == 0, done.stderr
    title, names, *rows = done.stdout.splitlines()
    assert title.startswith("answers to all nodes for a step of 40 sequences, 16 threads on ")
    assert names.split()[:5] == ["nodes", "ranks", "decided", "in", "all"]
    assert [row.split()[:2] for row in rows] == [["1", "2"], ["3", "6"]]
    for row in rows:
        _, _, *cells = row.replace(",", "").split()
        message, shares = (int(cells[i - 1]) for i, cell in enumerate(cells) if cell == "B")
        assert 0 < shares < message < shares + 10_000

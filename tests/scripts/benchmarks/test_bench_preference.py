"""The benchmark of preferences: pairs that are kept are whole and padded, and learn the same."""

import re
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from tests.support.processes import run_script
from tests.support.scripts import script_module

SCRIPT = Path(__file__).parents[3] / "scripts" / "benchmarks" / "bench_preference.py"


@pytest.fixture(scope="module")
def bench():
    with script_module("benchmarks/bench_preference.py") as module:
        yield module


@pytest.mark.parametrize("together", [1, 4])
def test_kept_pairs_are_whole_on_a_rank_and_padded(bench, together):
    _, sides = bench.drawn(seed=0, pairs=10, longest=512)  # the last micro-batch has fewer
    made = bench.kept(bench.padded(sides, together).ravel(), 4, together)
    made.validate()
    found = [made.micro_batch(m) for m in range(made.num_micro_batches)]
    assert [one.ranks for one in found] == [(m % 4,) for m in range(len(found))]
    assert [one.sequences for one in found] == [
        tuple(range(2 * first, 2 * min(first + together, 10))) for first in range(0, 10, together)
    ]
    for one in found:
        ids = list(one.sequences)
        assert set(made.lengths[ids]) == {sides.ravel()[ids].max()}


def test_a_simulation(bench, capsys):
    sizes = {"simulated_longest": 4096, "simulated_tokens": 4096, "simulated_pairs": 8}
    bench.simulate(Namespace(steps=2, together=[1, 4], simulated_ranks=[8], **sizes))
    rows = rows_of(capsys.readouterr().out)
    assert [row[:2] for row in rows] == [["8", "1"], ["8", "4"]]
    figures = np.array([row[2:] for row in rows], dtype=float)  # medians of two steps: means
    tokens, ours_s, others_s, ratios = figures.T
    assert 1 < tokens[0] < tokens[1] and ours_s[0] == ours_s[1]
    assert others_s / ours_s == pytest.approx(ratios, rel=0.2) and 1 < ratios[0] < ratios[1]


@pytest.mark.slow
def test_a_small_run():
    flags = "--ranks 2 --steps 2 --pairs 10 --longest 512 --tokens 384 --simulated-ranks 8"
    done = run_script(SCRIPT, *flags.split(), timeout_s=550)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(done.stdout)
    assert [row[0] for row in rows] == [
        "balanced",
        "kept, micro-batches of 1",
        "kept, micro-batches of 4",
        "8",
        "8",
    ]
    tokens = [int(row[1].split()[0].replace(",", "")) for row in rows[:3]]
    assert tokens[0] < tokens[1] < tokens[2]
    apart = [float(one) for one in re.findall(r"difference of the \w+: (\S+)", done.stdout)]
    assert len(apart) == 2 and max(apart) < 1e-6


def rows_of(text):
    """Cells of the rows of all tables, but for their heads."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    rows = [line.strip("| ").split(" | ") for line in lines]
    return [row for row in rows if row[0] not in ("pairs", "ranks")]

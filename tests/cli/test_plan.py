"""``megatron-hdp plan``: what it prints and writes, and what it refuses."""

import json
import os

import numpy as np
import pytest

from megatron_hdp.cli.main import main
from megatron_hdp.cli.plan import STRATEGIES
from megatron_hdp.cli.plan_report import num_bytes, seconds
from megatron_hdp.megatron.indexed_writer import IndexedWriter
from megatron_hdp.planner import LLAMA_7B, Plan


@pytest.fixture
def lengths(tmp_path):
    values = np.random.default_rng(0).integers(1, 9000, size=50)
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(map(str, values)) + "\n\n")
    return path


def run(*arguments):
    return main(["plan", *map(str, arguments)])


def test_summary(lengths, capsys):
    assert run("--lengths", lengths, "--ranks", 4, "--tokens-per-rank", 4096) == 0
    printed = capsys.readouterr().out
    assert "50 sequences" in printed
    assert "on 4 ranks of 4,096 tokens" in printed
    for name in ("strategy", "efficiency", "makespan", "micro-batches", "ring traffic", "planning"):
        assert f"\n  {name} " in printed


def test_the_output_is_a_valid_plan(lengths, tmp_path):
    output = tmp_path / "plan.json"
    arguments = ("--lengths", lengths, "--ranks", 4, "--tokens-per-rank", 4096)
    assert run(*arguments, "--strategy", "naive", "--output", output) == 0
    made = Plan.load(output)
    made.validate()
    assert (made.num_ranks, made.strategy) == (4, "naive")
    assert made.lengths.tolist() == [int(line) for line in lengths.read_text().split()]


def test_compare_has_a_row_for_every_strategy(lengths, capsys):
    assert run("--lengths", lengths, "--ranks", 4, "--tokens-per-rank", 4096, "--compare") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows[0][:3] == ["strategy", "efficiency", "makespan"]
    assert [row[0] for row in rows[1:4]] == ["static", "naive", "dp-balance"]
    assert all(0 < float(row[1]) <= 1 for row in rows[1:4])
    assert "auto" not in [row[0] for row in rows]


def test_plot(lengths, tmp_path):
    pytest.importorskip("matplotlib", reason="pip install 'megatron-hdp[plot]'")
    picture = tmp_path / "plan.png"
    assert (
        run("--lengths", lengths, "--ranks", 4, "--tokens-per-rank", 4096, "--plot", picture) == 0
    )
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_lengths_of_an_idx_without_its_bin(tmp_path, capsys):
    with IndexedWriter(tmp_path / "data", 257) as writer:
        for n in (5, 7, 900):
            writer.add(np.zeros(n, dtype=np.int64))
    os.remove(tmp_path / "data.bin")
    assert run("--lengths", tmp_path / "data.idx", "--ranks", 2, "--tokens-per-rank", 500) == 0
    assert "3 sequences, 912 tokens (median 7, longest 900)" in capsys.readouterr().out


def test_longer_sequences_are_cut_and_counted(lengths, capsys):
    arguments = ("--lengths", lengths, "--ranks", 2, "--tokens-per-rank", 4096)
    assert run(*arguments, "--max-length", 1000) == 0
    printed = capsys.readouterr().out
    num_longer = sum(int(line) > 1000 for line in lengths.read_text().split())
    assert f"{num_longer} of 50 sequences cut to 1,000 tokens" in printed
    assert "longest 1,000" in printed


def test_the_cost_model_and_the_node_size_count(lengths, tmp_path, capsys):
    slow = json.loads(LLAMA_7B.to_json()) | {"inter_node_bytes_per_s": 1e9, "ranks_per_node": 8}
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(slow))
    makespans = []
    for node in (8, 1):
        arguments = ("--ranks", 4, "--tokens-per-rank", 4096, "--strategy", "static")
        options = ("--cost-model", path, "--ranks-per-node", node)
        assert run("--lengths", lengths, *arguments, *options) == 0
        line = next(s for s in capsys.readouterr().out.splitlines() if "makespan " in s)
        makespans.append(float(line.split()[1]))
    assert makespans[1] > 2 * makespans[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("12\nabc\n", "line 2: found 'abc'"),
        ("12\n0\n", "line 2: found '0'"),
        ("-4\n", "line 1: found '-4'"),
        (f"{2**63}\n", "line 1"),
        ("1.5\n", "line 1: found '1.5'"),
        ("\n\n", "has no sequence length"),
    ],
)
def test_bad_lengths(tmp_path, capsys, content, message):
    path = tmp_path / "lengths.txt"
    path.write_text(content)
    assert run("--lengths", path, "--ranks", 2, "--tokens-per-rank", 100) == 2
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1
    assert error[0].startswith("megatron-hdp plan: error: ")
    assert message in error[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--ranks", 2, "--tokens-per-rank", 100), "tokens"),
        (("--ranks", 2, "--tokens-per-rank", 0), "tokens_per_rank is 0"),
        (("--ranks", 0, "--tokens-per-rank", 100), "ranks is 0"),
        (("--ranks", 2, "--tokens-per-rank", 9000, "--max-length", 0), "--max-length 0"),
        (("--ranks", 2, "--tokens-per-rank", 9000, "--ranks-per-node", 0), "ranks_per_node is 0"),
    ],
)
def test_what_cannot_be_planned(lengths, capsys, options, message):
    assert run("--lengths", lengths, *options) == 2
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1
    assert message in error[0]


def test_a_missing_file_and_a_refused_picture(lengths, tmp_path, capsys):
    assert run("--lengths", tmp_path / "absent", "--ranks", 2, "--tokens-per-rank", 100) == 2
    arguments = ("--lengths", lengths, "--ranks", 4, "--tokens-per-rank", 4096)
    assert run(*arguments, "--plot", tmp_path / "plan.txt") == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_the_flag_offers_the_strategies_there_are():
    from megatron_hdp.planner import STRATEGIES as PLANNED

    assert STRATEGIES == PLANNED


@pytest.mark.parametrize(
    ("value", "text"),
    [(2.5, "2.500 s"), (0.0025, "2.500 ms"), (2.5e-6, "2.500 us"), (0, "0.000 us")],
)
def test_seconds(value, text):
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.50 kB"), (2e12, "2.00 TB")]
)
def test_num_bytes(value, text):
    assert num_bytes(value) == text

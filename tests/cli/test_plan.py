"""``megatron-hdp plan``: what it prints and writes, and what it refuses."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from megatron_hdp.cli import plan_outcomes
from megatron_hdp.cli.main import main
from megatron_hdp.cli.plan_outcomes import COMPARED
from megatron_hdp.data import TokenWriter
from megatron_hdp.planner import LLAMA_7B, Plan
from megatron_hdp.simulator.units import num_bytes, seconds


@pytest.fixture
def lengths(tmp_path):
    values = np.random.default_rng(0).integers(1, 9000, size=50)
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(map(str, values)) + "\n\n")
    return path


def run(*arguments):
    try:
        return main(["plan", *map(str, arguments)])
    except SystemExit as leaving:  # a flag's own mistake
        return leaving.code


def test_summary(lengths, capsys):
    assert run("--lengths", lengths, "--ranks", 4, "--tokens-per-rank", 4096) == 0
    printed = capsys.readouterr().out
    assert "50 sequences" in printed
    assert "on 4 ranks of 4,096 tokens" in printed
    for name in (
        "strategy",
        "cost model",
        "efficiency",
        "bound/makespan",
        "makespan",
        "micro-batches",
        "ring traffic",
        "planning",
    ):
        assert f"\n  {name} " in printed
    assert "llama-7b  (7B parameters" in printed
    assert "(total compute / ranks / makespan)" in printed
    assert "target" not in printed


def figures(printed):
    """The summary's lines, by name."""
    lines = [line for line in printed.splitlines() if line.startswith("  ")]
    return {line[2:17].strip(): line[18:] for line in lines}


def figure(printed, name):
    return float(figures(printed)[name].split()[0])


def test_both_efficiencies_are_what_they_say(lengths, tmp_path, capsys):
    """A sequence that only one rank could run faster: far from even, and at the bound."""
    (tmp_path / "one").write_text("8192\n")
    free = {"a": 0, "b": 1, "kv_bytes_per_token": 1e9, "ranks_per_node": 1}
    (tmp_path / "cost.json").write_text(json.dumps(free | {"inter_node_bytes_per_s": 1.0}))
    arguments = ("--ranks", 4, "--tokens-per-rank", 8192, "--cost-model", tmp_path / "cost.json")
    assert run("--lengths", tmp_path / "one", *arguments, "--strategy", "naive") == 0
    printed = capsys.readouterr().out
    assert figure(printed, "efficiency") == 0.25
    assert figure(printed, "bound/makespan") == 1.0
    assert figures(printed)["cost model"].endswith("cost.json")


def test_a_tighter_bound_has_its_own_line(tmp_path, capsys):
    links = {"intra_node_bytes_per_s": 7e9, "inter_node_bytes_per_s": 7e9}
    slow = json.loads(LLAMA_7B.to_json()) | links
    (tmp_path / "cost.json").write_text(json.dumps(slow))
    (tmp_path / "lengths").write_text("16384\n" * 3)
    arguments = ("--lengths", tmp_path / "lengths", "--ranks", 4, "--tokens-per-rank", 16_384)
    assert run(*arguments, "--cost-model", tmp_path / "cost.json") == 0
    printed = capsys.readouterr().out
    assert figure(printed, "bound/makespan") < figure(printed, "proven/makespan") <= 1
    assert "no plan takes less than" in figures(printed)["proven/makespan"]


def test_a_preset(capsys):
    arguments = ("--lengths", "preset:github", "--ranks", 8, "--tokens-per-rank", 1024)
    assert run(*arguments, "--seed", 2, "--global-batch-tokens", 20_000, "--max-length", 2000) == 0
    printed = capsys.readouterr().out
    assert "preset github, seed 2: 20,000 tokens, cut to 2,000 a sequence" in printed
    assert "20,000 tokens (median" in printed
    assert run(*arguments) == 0
    assert "seed 0: 32,768 tokens, cut to 8,192 a sequence" in capsys.readouterr().out


def test_stages(lengths, tmp_path, capsys):
    arguments = ("--lengths", lengths, "--ranks", 4, "--tokens-per-rank", 4096)
    arguments += ("--pipeline-stages", 2, "--strategy", "static")
    trace = tmp_path / "trace.json"
    assert run(*arguments, "--trace", trace, "--plot", tmp_path / "plan.html") == 0
    printed = capsys.readouterr().out
    assert "on 4 ranks of 4,096 tokens and 2 stages" in printed
    assert "(total compute / ranks / stages / makespan)" in printed
    assert 0 < figure(printed, "efficiency") < figure(printed, "target/makespan") <= 1.1
    names = [event["name"] for event in json.loads(trace.read_bytes())["traceEvents"]]
    assert any(name.endswith(", backward") for name in names)
    assert run(*arguments, "--virtual-stages", 3) == 0
    assert "4,096 tokens and 2 stages of 3 virtual stages each\n" in capsys.readouterr().out


@pytest.mark.parametrize("stages, offloads", [(1, True), (8, True), (16, False)])
def test_offload_leaves_two_layers_of_every_stage(tmp_path, capsys, stages, offloads):
    """LLaMA-7B has 32 layers: with 16 stages both layers of each stay."""
    path = tmp_path / "lengths.txt"
    path.write_text("131072\n" * 4)  # of a batch of one, a ring of fewer ranks saves none
    options = ["--lengths", path, "--ranks", 16, "--tokens-per-rank", 8192]
    run(*options, "--pipeline-stages", stages, "--offload", "auto", "--strategy", "naive")
    assert ("offloading" in capsys.readouterr().out) == offloads


def test_a_slow_rank(lengths, tmp_path, capsys):
    speeds = tmp_path / "speeds"
    speeds.write_text("1\n1\n1\n0.5\n")
    arguments = ("--lengths", lengths, "--ranks", 4, "--tokens-per-rank", 4096)
    makespans = []
    for flags in ((), ("--rank-speeds", speeds)):
        assert run(*arguments, "--strategy", "static", *flags) == 0
        printed = capsys.readouterr().out
        makespans.append(figure(printed, "makespan"))
    assert "(total compute / sum of speeds / makespan)" in printed
    assert makespans[1] == pytest.approx(2 * makespans[0], rel=0.01)  # every ring has the slow one


def test_a_larger_model_takes_longer(lengths, capsys):
    arguments = ("--lengths", lengths, "--ranks", 4, "--tokens-per-rank", 4096)
    makespans = []
    for model in ("llama-7b", "llama-70b"):
        assert run(*arguments, "--strategy", "naive", "--model", model) == 0
        makespans.append(figure(capsys.readouterr().out, "makespan"))
    assert makespans[1] > 4 * makespans[0]


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
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines()[1:]]
    assert rows[0][:4] == ["strategy", "efficiency", "bound/makespan", "makespan"]
    assert [row[0] for row in rows[1:7]] == list(COMPARED)
    table = {row[0]: row[1:] for row in rows[1:7]}
    for strategy in ("static", "naive", "dynamic-cp", "dp-balance"):
        assert 0 < float(table[strategy][0]) <= float(table[strategy][1]) <= 1
    assert "no plan takes less than" in printed


def test_compare_says_why_a_row_is_empty(lengths, capsys, monkeypatch):
    def refuse(strategy, request):
        if strategy == "naive":
            raise ValueError("gives up")
        return plan_with(strategy, request)

    plan_with = plan_outcomes.plan_with
    monkeypatch.setattr(plan_outcomes, "plan_with", refuse)
    arguments = ("--ranks", 4, "--tokens-per-rank", 4096)
    assert run("--lengths", lengths, *arguments, "--strategy", "static", "--compare") == 0
    printed = capsys.readouterr().out.splitlines()
    (row,) = [line.split() for line in printed if line.startswith("  naive ")]
    assert set(row[1:]) == {"-"}
    assert any(line == "  naive: gives up" for line in printed)


def test_trace_and_page(lengths, tmp_path, capsys):
    trace, page = tmp_path / "trace.json", tmp_path / "plan.html"
    arguments = ("--lengths", lengths, "--ranks", 4, "--tokens-per-rank", 4096)
    assert run(*arguments, "--trace", trace, "--plot", page, "--ranks-per-node", 2) == 0
    printed = capsys.readouterr().out
    assert f"picture written to {page}" in printed and f"trace written to {trace}" in printed
    assert page.read_text().startswith("<!doctype html>")
    assert {event["pid"] for event in json.loads(trace.read_bytes())["traceEvents"]} == {0, 1}


def test_plot(lengths, tmp_path):
    pytest.importorskip("matplotlib", reason="pip install 'megatron-hdp[plot]'")
    picture = tmp_path / "plan.png"
    assert (
        run("--lengths", lengths, "--ranks", 4, "--tokens-per-rank", 4096, "--plot", picture) == 0
    )
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_lengths_of_an_idx_without_its_bin(tmp_path, capsys):
    with TokenWriter(tmp_path / "data", 257) as writer:
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
        makespans.append(figure(capsys.readouterr().out, "makespan"))
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
        ("", "has no sequence length"),
        ("12 34\n", "line 1: found '12 34'"),
        ("5\n" * 700_000 + "x\n" + "5\n" * 9, "line 700001: found 'x'"),
        ("9" * 5000, "found a line of more than 4,096 characters that begins with '9999"),
        ("9" * 4000, "line 1: found '9999"),
        ("\x89PNG\r\n\x1a\n\0\0", r"line 1: found '\x89PNG'"),
        ("\u0661\n", "line 1: found '\u0661'"),
    ],
)
def test_bad_lengths(tmp_path, capsys, content, message):
    path = tmp_path / "lengths.txt"
    path.write_text(content, encoding="utf-8")
    assert run("--lengths", path, "--ranks", 2, "--tokens-per-rank", 100) == 2
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1
    assert error[0].startswith(f"megatron-hdp plan: error: {path}")
    assert message in error[0]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_lengths_that_are_no_utf_8_are_named(tmp_path, capsys, encoding):
    path = tmp_path / "lengths.txt"
    path.write_text("12\n34\n", encoding=encoding)
    assert run("--lengths", path, "--ranks", 2, "--tokens-per-rank", 100) == 2
    assert f"{path}, line 1: found " in capsys.readouterr().err


ROOMY = ("--ranks", 2, "--tokens-per-rank", 9000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--ranks", 2, "--tokens-per-rank", 100), "tokens"),
        (("--ranks", 2, "--tokens-per-rank", 0), "--tokens-per-rank: found 0, expected at least 1"),
        (("--ranks", 0, "--tokens-per-rank", 100), "--ranks: found 0, expected at least 1"),
        ((*ROOMY, "--max-length", 0), "--max-length: found 0"),
        ((*ROOMY, "--ranks-per-node", 0), "--ranks-per-node: found 0"),
        ((*ROOMY, "--pipeline-stages", 0), "--pipeline-stages: found 0"),
        ((*ROOMY, "--effort", 0), "--effort: found 0"),
        ((*ROOMY, "--global-batch-tokens", 0), "--global-batch-tokens: found 0"),
        ((*ROOMY, "--global-batch-tokens", 1), "the first sequence of"),
        ((*ROOMY, "--seed", 1), "--seed 1 has no effect"),
        ((*ROOMY, "--model", "llama"), "nearest: llama-7b"),
        (
            ("--ranks", 2**20 + 1, "--tokens-per-rank", 1),
            "--ranks: found 1,048,577, expected at most",
        ),
        (
            (*ROOMY[:3], 10**20),
            "--tokens-per-rank: found 100,000,000,000,000,000,000, expected",
        ),
        ((*ROOMY, "--effort", 10**20), "--effort: found 100,000"),
        (("--ranks", 1, "--tokens-per-rank", 100), "raise --tokens-per-rank or add ranks"),
        (("--ranks", 2, "--tokens-per-rank", 1), "raise --tokens-per-rank"),
        ((*ROOMY, "--rank-speeds", "absent"), "No such file"),
        (
            (*ROOMY, "--model", "llama-7b", "--cost-model", "x.json"),
            "found --cost-model x.json and --model llama-7b; expected one of them: drop --model",
        ),
    ],
)
def test_what_cannot_be_planned(lengths, capsys, options, message):
    assert run("--lengths", lengths, *options) == 2
    *usage, error = capsys.readouterr().err.splitlines()
    assert message in error
    assert not usage or usage[0].startswith("usage: ")


def test_the_remedy_names_the_flags_of_plan(tmp_path, capsys):
    path = tmp_path / "lengths"
    path.write_text("131072\n")
    assert run("--lengths", path, "--ranks", 8, "--tokens-per-rank", 8192) == 2
    error = capsys.readouterr().err
    assert "raise --tokens-per-rank or add ranks, or use --offload auto, which needs" in error
    assert "hdp" not in error.removeprefix("megatron-hdp")


def test_results_do_not_overwrite_each_other_or_what_is_read(lengths, tmp_path, capsys):
    arguments = ("--lengths", lengths, "--ranks", 4, "--tokens-per-rank", 4096)
    one, other = tmp_path / "result", tmp_path / "." / "sub" / ".." / "result"
    (tmp_path / "sub").mkdir()
    text = lengths.read_text()
    for flags, message in (
        (("--output", one, "--trace", other), "is the file of --output as well: give another"),
        (("--plot", f"{one}.html", "--trace", f"{one}.html"), "is the file of --plot as well"),
        (("--output", lengths), "is the file of --lengths as well"),
    ):
        assert run(*arguments, *flags) == 2
        assert message in capsys.readouterr().err
    assert lengths.read_text() == text
    assert sorted(os.listdir(tmp_path)) == ["lengths.txt", "sub"]


def test_a_plan_that_cannot_be_written_leaves_nothing(lengths, tmp_path, monkeypatch):
    def fail(self, path):
        path = Path(path)
        path.write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(Plan, "save", fail)
    arguments = ("--lengths", lengths, "--ranks", 4, "--tokens-per-rank", 4096)
    assert run(*arguments, "--output", tmp_path / "plan.json") == 2
    assert os.listdir(tmp_path) == ["lengths.txt"]


def test_a_missing_file_and_a_refused_picture(lengths, tmp_path, capsys):
    assert run("--lengths", tmp_path / "absent", "--ranks", 2, "--tokens-per-rank", 100) == 2
    arguments = ("--lengths", lengths, "--ranks", 4, "--tokens-per-rank", 4096)
    assert run(*arguments, "--plot", tmp_path / "plan.txt") == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_the_help_names_the_models_there_are():
    from megatron_hdp.cli.plan import _MODELS
    from megatron_hdp.planner.shape import MODELS

    named = _MODELS.split(", ")
    assert len(named) == len(MODELS)
    assert all(model.endswith(short) for model, short in zip(MODELS, named, strict=True))


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


EXPERTS = ("--expert-parallel-size", 4, "--expert-share", 0.5)


def test_ranks_that_share_experts(lengths, tmp_path, capsys):
    output = tmp_path / "plan.json"
    ranks = ("--lengths", lengths, "--ranks", 8, "--tokens-per-rank", 4096)
    assert run(*ranks, *EXPERTS, "--output", output) == 0
    found = figures(capsys.readouterr().out)
    assert found["strategy"] == "ep-balance"
    made = Plan.load(output)
    number = int(made.summary["num_positions"])
    assert found["slots"].startswith(f"{number} at most, padding in ")
    assert made.positions.max() + 1 == number
    assert all("position" in one for one in json.loads(output.read_bytes())["micro_batches"])


@pytest.mark.parametrize("stages", [(), ("--pipeline-stages", 2, "--virtual-stages", 2)])
def test_plans_in_lockstep_are_drawn(lengths, tmp_path, capsys, stages):
    ranks = ("--lengths", lengths, "--ranks", 8, "--tokens-per-rank", 4096)
    plot, trace = tmp_path / "plan.html", tmp_path / "trace.json"
    assert run(*ranks, *EXPERTS, *stages, "--plot", plot, "--trace", trace) == 0
    makespan, unit = figures(capsys.readouterr().out)["makespan"].split()
    makespan_us = float(makespan) * {"s": 1e6, "ms": 1e3}[unit]
    assert plot.stat().st_size > 10_000
    bars = [one for one in json.loads(trace.read_bytes())["traceEvents"] if one["ph"] == "X"]
    ends = [one["ts"] + one["dur"] for one in bars]
    assert 0.9 * makespan_us < max(ends) < 1.001 * makespan_us


def test_what_experts_are_sent_is_shown_where_a_model_says_it(lengths, capsys):
    ranks = ("--lengths", lengths, "--ranks", 8, "--tokens-per-rank", 4096)
    shared = ("--expert-parallel-size", 4)
    assert run(*ranks, *shared) == 0
    assert "all-to-all" not in capsys.readouterr().out
    assert run(*ranks, *shared, "--model", "mistral-8x7b") == 0
    text = capsys.readouterr().out
    tokens = int(re.search(r"sequences, ([\d,]+) tokens", text)[1].replace(",", ""))
    # out and back, forward and backward: two experts in each of 32 layers, three of four elsewhere
    sent = 2 * 2 * tokens * 32 * 2 * 4096 * 2 * 3 / 4
    assert figures(text)["all-to-all"] == num_bytes(sent)


def test_strategies_are_compared_in_lockstep(lengths, capsys):
    ranks = ("--lengths", lengths, "--ranks", 8, "--tokens-per-rank", 4096)
    assert run(*ranks, "--compare") == 0
    alone = capsys.readouterr().out
    assert run(*ranks, *EXPERTS, "--compare") == 0
    together = capsys.readouterr().out
    shares = {
        name: [
            float(line.split()[1]) for line in text.splitlines() if line.startswith(f"  {name} ")
        ]
        for text in (alone, together)
        for name in ("dp-balance", "ep-balance")
    }
    assert "ep-balance" not in alone
    assert shares["ep-balance"][0] >= shares["dp-balance"][0]


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--expert-parallel-size", 3), "--expert-parallel-size is 3; expected a divisor of the 8"),
        (("--expert-share", 1.5), "--expert-share is 1.5; expected 0 to 1"),
    ],
)
def test_experts_that_cannot_be_planned(lengths, capsys, flags, message):
    assert run("--lengths", lengths, "--ranks", 8, "--tokens-per-rank", 4096, *flags) == 2
    assert message in capsys.readouterr().err

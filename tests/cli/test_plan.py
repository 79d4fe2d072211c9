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


def on_ranks(lengths, *flags, ranks=4):
    return run("--lengths", lengths, "--ranks", ranks, "--tokens-per-rank", 4096, *flags)


@pytest.fixture
def printed(lengths, capsys):
    """Runs the command on four ranks, or others, and returns what it prints."""

    def of(*flags, ranks=4):
        assert on_ranks(lengths, *flags, ranks=ranks) == 0
        return capsys.readouterr().out

    return of


SUMMARY = "strategy, cost model, efficiency, bound/makespan, makespan, micro-batches, ring traffic"


def test_summary(printed):
    text = printed()
    assert "50 sequences" in text
    assert "on 4 ranks of 4,096 tokens" in text
    for name in (*SUMMARY.split(", "), "planning"):
        assert f"\n  {name} " in text
    assert "llama-7b  (7B parameters" in text
    assert "(total compute / ranks / makespan)" in text
    assert "target" not in text


def figures(printed):
    """The summary's lines, by name."""
    lines = [line for line in printed.splitlines() if line.startswith("  ")]
    return {line[2:17].strip(): line[18:] for line in lines}


def figure(printed, name):
    return float(figures(printed)[name].split()[0])


def cost_model(folder, **figures):
    path = folder / "cost.json"
    path.write_text(json.dumps(figures))
    return "--cost-model", path


def test_both_efficiencies_are_what_they_say(tmp_path, capsys):
    """A sequence that only one rank could run faster: far from even, and at the bound."""
    (tmp_path / "one").write_text("8192\n")
    slow = {"kv_bytes_per_token": 1e9, "ranks_per_node": 1, "inter_node_bytes_per_s": 1.0}
    free = cost_model(tmp_path, a=0, b=1, **slow)
    arguments = ("--ranks", 4, "--tokens-per-rank", 8192, *free, "--strategy", "naive")
    assert run("--lengths", tmp_path / "one", *arguments) == 0
    text = capsys.readouterr().out
    assert figure(text, "efficiency") == 0.25
    assert figure(text, "bound/makespan") == 1.0
    assert figures(text)["cost model"].endswith("cost.json")


def test_a_tighter_bound_has_its_own_line(tmp_path, capsys):
    links = {"intra_node_bytes_per_s": 7e9, "inter_node_bytes_per_s": 7e9}
    slow = cost_model(tmp_path, **json.loads(LLAMA_7B.to_json()) | links)
    (tmp_path / "lengths").write_text("16384\n" * 3)
    arguments = ("--lengths", tmp_path / "lengths", "--ranks", 4, "--tokens-per-rank", 16_384)
    assert run(*arguments, *slow) == 0
    text = capsys.readouterr().out
    assert figure(text, "bound/makespan") < figure(text, "proven/makespan") <= 1
    assert "no plan takes less than" in figures(text)["proven/makespan"]


def test_a_preset(capsys):
    arguments = ("--lengths", "preset:github", "--ranks", 8, "--tokens-per-rank", 1024)
    assert run(*arguments, "--seed", 2, "--global-batch-tokens", 20_000, "--max-length", 2000) == 0
    text = capsys.readouterr().out
    assert "preset github, seed 2: 20,000 tokens, cut to 2,000 a sequence" in text
    assert "20,000 tokens (median" in text
    assert run(*arguments) == 0
    assert "seed 0: 32,768 tokens, cut to 8,192 a sequence" in capsys.readouterr().out


def test_stages(printed, tmp_path):
    stages = ("--pipeline-stages", 2, "--strategy", "static")
    trace = tmp_path / "trace.json"
    text = printed(*stages, "--trace", trace, "--plot", tmp_path / "plan.html")
    assert "on 4 ranks of 4,096 tokens and 2 stages" in text
    assert "(total compute / ranks / stages / makespan)" in text
    assert 0 < figure(text, "efficiency") < figure(text, "target/makespan") <= 1.1
    names = [event["name"] for event in json.loads(trace.read_bytes())["traceEvents"]]
    assert any(name.endswith(", backward") for name in names)
    auto, most = (printed(*stages, "--sequence-parts", parts) for parts in ("auto", 16))
    assert "in up to 16 parts" in auto
    assert figure(auto, "makespan") == figure(most, "makespan") < figure(text, "makespan")
    over_nodes = (*stages, "--sequence-parts", 16, "--ranks-per-node", 2)
    double, plain = (printed(*over_nodes, "--double-rings", rings) for rings in ("auto", "off"))
    assert figure(double, "makespan") < figure(plain, "makespan")
    virtual = printed(*stages, "--virtual-stages", 3)
    assert "4,096 tokens and 2 stages of 3 virtual stages each\n" in virtual


@pytest.mark.parametrize("stages, offloads", [(1, True), (8, True), (16, False)])
def test_offload_leaves_two_layers_of_every_stage(tmp_path, capsys, stages, offloads):
    """LLaMA-7B has 32 layers: with 16 stages both layers of each stay."""
    path = tmp_path / "lengths.txt"
    path.write_text("131072\n" * 4)  # of a batch of one, a ring of fewer ranks saves none
    options = ["--lengths", path, "--ranks", 16, "--tokens-per-rank", 8192]
    run(*options, "--pipeline-stages", stages, "--offload", "auto", "--strategy", "naive")
    assert ("offloading" in capsys.readouterr().out) == offloads


def test_a_slow_rank(printed, tmp_path):
    speeds = tmp_path / "speeds"
    speeds.write_text("1\n1\n1\n0.5\n")
    even, slow = printed("--strategy=static"), printed("--strategy=static", "--rank-speeds", speeds)
    assert "(total compute / sum of speeds / makespan)" in slow
    twice = 2 * figure(even, "makespan")  # every ring has the slow one
    assert figure(slow, "makespan") == pytest.approx(twice, rel=0.01)


def test_a_larger_model_takes_longer(printed):
    small, large = (
        figure(printed("--strategy=naive", "--model", model), "makespan")
        for model in ("llama-7b", "llama-70b")
    )
    assert large > 4 * small


def test_the_output_is_a_valid_plan(lengths, printed, tmp_path):
    output = tmp_path / "plan.json"
    printed("--strategy", "naive", "--output", output)
    made = Plan.load(output)
    made.validate()
    assert (made.num_ranks, made.strategy) == (4, "naive")
    assert made.lengths.tolist() == [int(line) for line in lengths.read_text().split()]


def test_compare_has_a_row_for_every_strategy(printed):
    text = printed("--compare")
    rows = [line.split() for line in text.splitlines()[1:]]
    assert rows[0][:4] == ["strategy", "efficiency", "bound/makespan", "makespan"]
    assert [row[0] for row in rows[1 : 1 + len(COMPARED)]] == list(COMPARED)
    table = {row[0]: row[1:] for row in rows[1 : 1 + len(COMPARED)]}
    for strategy in ("static", "naive", "dynamic-cp", "dp-balance"):
        assert 0 < float(table[strategy][0]) <= float(table[strategy][1]) <= 1
    assert "no plan takes less than" in text


def test_compare_says_why_a_row_is_empty(printed, monkeypatch):
    def refuse(strategy, request):
        if strategy == "naive":
            raise ValueError("gives up")
        return plan_with(strategy, request)

    plan_with = plan_outcomes.plan_with
    monkeypatch.setattr(plan_outcomes, "plan_with", refuse)
    lines = printed("--strategy", "static", "--compare").splitlines()
    (row,) = [line.split() for line in lines if line.startswith("  naive ")]
    assert set(row[1:]) == {"-"}
    assert "  naive: gives up" in lines


def test_trace_and_page(printed, tmp_path):
    trace, page = tmp_path / "trace.json", tmp_path / "plan.html"
    text = printed("--trace", trace, "--plot", page, "--ranks-per-node", 2)
    assert f"picture written to {page}" in text and f"trace written to {trace}" in text
    assert page.read_text().startswith("<!doctype html>")
    assert {event["pid"] for event in json.loads(trace.read_bytes())["traceEvents"]} == {0, 1}


def test_plot(printed, tmp_path):
    pytest.importorskip("matplotlib", reason="pip install 'megatron-hdp[plot]'")
    picture = tmp_path / "plan.png"
    printed("--plot", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_lengths_of_an_idx_without_its_bin(tmp_path, capsys):
    with TokenWriter(tmp_path / "data", 257) as writer:
        for n in (5, 7, 900):
            writer.add(np.zeros(n, dtype=np.int64))
    os.remove(tmp_path / "data.bin")
    assert run("--lengths", tmp_path / "data.idx", "--ranks", 2, "--tokens-per-rank", 500) == 0
    assert "3 sequences, 912 tokens (median 7, longest 900)" in capsys.readouterr().out


def test_longer_sequences_are_cut_and_counted(lengths, printed):
    text = printed("--max-length", 1000, ranks=2)
    num_longer = sum(int(line) > 1000 for line in lengths.read_text().split())
    assert f"{num_longer} of 50 sequences cut to 1,000 tokens" in text
    assert "longest 1,000" in text


def test_the_cost_model_and_the_node_size_count(printed, tmp_path):
    nodes = {"inter_node_bytes_per_s": 1e9, "ranks_per_node": 8}
    slow = cost_model(tmp_path, **json.loads(LLAMA_7B.to_json()) | nodes)
    one_node, four = (
        figure(printed("--strategy=static", *slow, "--ranks-per-node", node), "makespan")
        for node in (8, 1)
    )
    assert four > 2 * one_node


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
        ((*ROOMY, "--sequence-parts", 0), "--sequence-parts: found 0, expected at least 1"),
        ((*ROOMY, "--sequence-parts", "all"), "invalid int or auto value: 'all'"),
        ((*ROOMY, "--global-batch-tokens", 0), "--global-batch-tokens: found 0"),
        ((*ROOMY, "--global-batch-tokens", 1), "the first sequence of"),
        ((*ROOMY, "--seed", 1), "--seed 1 has no effect"),
        ((*ROOMY, "--model", "llama"), "nearest: llama-7b"),
        (("--ranks", 2**20 + 1, "--tokens-per-rank", 1), "--ranks: found 1,048,577, expected at"),
        ((*ROOMY[:3], 10**20), "--tokens-per-rank: found 100,000,000,000,000,000,000, expected"),
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
    one, other = tmp_path / "result", tmp_path / "." / "sub" / ".." / "result"
    (tmp_path / "sub").mkdir()
    text = lengths.read_text()
    for flags, message in (
        (("--output", one, "--trace", other), "is the file of --output as well: give another"),
        (("--plot", f"{one}.html", "--trace", f"{one}.html"), "is the file of --plot as well"),
        (("--output", lengths), "is the file of --lengths as well"),
        (("--output", tmp_path / "sub"), "found a folder, expected a file's name"),
    ):
        assert on_ranks(lengths, *flags) == 2
        assert message in capsys.readouterr().err
    assert lengths.read_text() == text
    assert sorted(os.listdir(tmp_path)) == ["lengths.txt", "sub"]


def test_a_plan_that_cannot_be_written_leaves_nothing(lengths, tmp_path, monkeypatch):
    def fail(self, path):
        path = Path(path)
        path.write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(Plan, "save", fail)
    assert on_ranks(lengths, "--output", tmp_path / "plan.json") == 2
    assert os.listdir(tmp_path) == ["lengths.txt"]


def test_a_missing_file_and_a_refused_picture(lengths, tmp_path, capsys):
    assert on_ranks(tmp_path / "absent") == 2
    assert on_ranks(lengths, "--plot", tmp_path / "plan.txt") == 2
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


def test_ranks_that_share_experts(printed, tmp_path):
    output = tmp_path / "plan.json"
    found = figures(printed(*EXPERTS, "--output", output, ranks=8))
    assert found["strategy"] == "ep-balance"
    made = Plan.load(output)
    number = int(made.summary["num_positions"])
    assert found["slots"].startswith(f"{number} at most, padding in ")
    assert made.positions.max() + 1 == number
    assert all("position" in one for one in json.loads(output.read_bytes())["micro_batches"])


@pytest.mark.parametrize("stages", [(), ("--pipeline-stages", 2, "--virtual-stages", 2)])
def test_plans_in_lockstep_are_drawn(printed, tmp_path, stages):
    plot, trace = tmp_path / "plan.html", tmp_path / "trace.json"
    text = printed(*EXPERTS, *stages, "--plot", plot, "--trace", trace, ranks=8)
    makespan, unit = figures(text)["makespan"].split()
    makespan_us = float(makespan) * {"s": 1e6, "ms": 1e3}[unit]
    assert plot.stat().st_size > 10_000
    bars = [one for one in json.loads(trace.read_bytes())["traceEvents"] if one["ph"] == "X"]
    ends = [one["ts"] + one["dur"] for one in bars]
    assert 0.9 * makespan_us < max(ends) < 1.001 * makespan_us


def test_what_experts_are_sent_is_shown_where_a_model_says_it(printed):
    shared = ("--expert-parallel-size", 4)
    assert "all-to-all" not in printed(*shared, ranks=8)
    text = printed(*shared, "--model", "mistral-8x7b", ranks=8)
    tokens = int(re.search(r"sequences, ([\d,]+) tokens", text)[1].replace(",", ""))
    # out and back, forward and backward: two experts in each of 32 layers, three of four elsewhere
    sent = 2 * 2 * tokens * 32 * 2 * 4096 * 2 * 3 / 4
    assert figures(text)["all-to-all"] == num_bytes(sent)


def test_strategies_are_compared_in_lockstep(printed):
    assert "ep-balance" not in printed("--compare", ranks=8)
    rows = [line.split() for line in printed(*EXPERTS, "--compare", ranks=8).splitlines()]
    efficiency = {row[0]: row[1] for row in rows if len(row) > 1}
    assert float(efficiency["ep-balance"]) >= float(efficiency["dp-balance"])


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--expert-parallel-size", 3), "--expert-parallel-size is 3; expected a divisor of the 8"),
        (("--expert-share", 1.5), "--expert-share is 1.5; expected 0 to 1"),
    ],
)
def test_experts_that_cannot_be_planned(lengths, capsys, flags, message):
    assert on_ranks(lengths, *flags, ranks=8) == 2
    assert message in capsys.readouterr().err

"""``megatron-hdp simulate``: figures, tables, files, and what it refuses."""

import argparse
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_hdp.cli import simulate, simulated_run
from megatron_hdp.cli.main import main
from megatron_hdp.data.mixture import BatchSize, Opening, Position, open_corpus, read_data_file
from megatron_hdp.data.presets import preset_lengths
from megatron_hdp.megatron.options import planned_weights
from megatron_hdp.planner import LLAMA_7B, CostModel, evaluate
from megatron_hdp.planner.experts import figures_in_lockstep
from megatron_hdp.simulator.execution import Machine
from tests.simulator.browser import data_of
from tests.support.sources import data_file, write_sources

CONFIG = """
num-layers: 8
hidden-size: 512
num-attention-heads: 8
num-query-groups: 4
seq-length: 65536
hdp-tokens-per-rank: 8192
hdp-global-batch-tokens: 262144
tokenizer-type: byte
bf16: true
swiglu: true
untie-embeddings-and-output-weights: true
use-distributed-optimizer: true
train-iters: 10
lr: 1e-4
attention-dropout: 0
hidden-dropout: 0
disable-bias-linear: true
"""

TWO_STAGES = ("--pipeline-model-parallel-size", "2")
VIRTUAL_STAGES = (*TWO_STAGES, "--num-virtual-stages-per-pipeline-rank", "2")
UNEVEN_STAGES = (*TWO_STAGES, "--pipeline-model-parallel-layout", "Et|t*2|t*2|t*3L")
TENSOR = ("--tensor-model-parallel-size", "4")
EXPERTS = (
    *("--num-experts", "8", "--moe-ffn-hidden-size", "512", "--expert-model-parallel-size", "4"),
    *("--moe-token-dispatcher-type", "alltoall"),
)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(CONFIG)
    return path


def report(config: Path, *flags: str, gpus: int = 16) -> dict[str, Any]:
    output = config.with_name("report.json")
    argv = ["simulate", "--config", str(config), "--gpus", str(gpus), "--output", str(output)]
    assert main([*argv, *flags]) == 0
    found: dict[str, Any] = json.loads(output.read_bytes())
    return found


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["simulate", *argv]) == 2
    return capsys.readouterr().err


def test_virtual_stages_wait_less_and_hold_more(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--steps", "1", "--strategies", "static", "--data", "preset:byted", "--")
    plain, virtual = (
        report(config, *flags, *stages)["strategies"]["static"]
        for stages in (TWO_STAGES, VIRTUAL_STAGES)
    )
    assert virtual["bubble_share"] < plain["bubble_share"]
    assert virtual["step_time_s"] < plain["step_time_s"]
    assert virtual["peak_memory_bytes"] > plain["peak_memory_bytes"]
    shown = capsys.readouterr().out
    assert "8 HDP ranks of 8,192 tokens and 2 stages of 2 virtual stages each" in shown


def test_auto_parts_are_run_as_their_number(config: Path) -> None:
    flags = ("--steps", "1", "--strategies", "static,auto", "--", *TWO_STAGES)
    whole, auto, named = (
        report(config, *flags, *more)["strategies"]["auto"]["step_time_s"]
        for more in ((), *(("--hdp-sequence-parts", number) for number in ("auto", "16")))
    )
    assert auto == named < whole


def test_stages_of_unequal_layers_take_their_weights(config: Path) -> None:
    flags = ("--steps", "1", "--strategies", "static", "--data", "preset:byted", "--")
    uneven = ("--decoder-first-pipeline-num-layers", "2")
    even, other = (
        report(config, *flags, *TWO_STAGES, *more)["strategies"]["static"] for more in ((), uneven)
    )
    even_s, other_s = (one["steps"][0]["makespan_s"] for one in (even, other))
    assert other_s > 1.05 * even_s  # 6 of 8 layers on the second stage
    assert other["bubble_share"] > even["bubble_share"]


@pytest.mark.parametrize(("more", "strategy"), [((), "pp-balance"), (EXPERTS, "ep-balance")])
def test_unequal_virtual_stages_are_executed_as_they_are_evaluated(
    config: Path, more: tuple[str, ...], strategy: str
) -> None:
    parser = argparse.ArgumentParser()
    simulate.add_parser(parser.add_subparsers())
    argv = ["simulate", "--config", str(config), "--gpus", "16", "--", *UNEVEN_STAGES, *more]
    arguments = parser.parse_args(argv)
    options = simulated_run.options_of(arguments)
    setting = simulated_run.setting_of(arguments, options, {})
    pipeline, costs = setting.pipeline, setting.cost_model
    assert (pipeline.stages, pipeline.chunks) == (2, 2)
    assert setting.job is not None and setting.lockstep_ranks == (4 if more else 1)
    assert pipeline.weights == planned_weights(options, setting.job.shape.vocab_size)
    assert pipeline.weights[0] < pipeline.weights[1] < pipeline.weights[3]
    made = setting.planned(
        preset_lengths("byted", num_tokens=2**18, max_length=2**16, seed=0), "auto"
    )
    assert made.strategy == strategy
    run = dataclasses.replace(setting, machine=Machine()).executed(made)
    found = (
        figures_in_lockstep(made, costs, 4, pipeline)
        if more
        else evaluate(made, costs, pipeline.stages, pipeline.chunks, pipeline.weights)
    )
    assert run.makespan_s == pytest.approx(found.makespan_s, rel=1e-9)
    assert made.summary["makespan_s"] == pytest.approx(found.makespan_s, rel=1e-9)


def test_report(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(config, "--steps", "3", "--data", "preset:byted", "--seed", "4")
    assert (found["config"], found["gpus"], found["seed"]) == (str(config), 16, 4)
    assert list(found["strategies"]) == ["static", "naive", "bytescale", "auto"]
    for figures in found["strategies"].values():
        assert figures["reason"] is None
        assert len(figures["steps"]) == 3
        assert figures["peak_memory_bytes"] > 3e9
        assert 0 < figures["mfu"] < 0.5
        assert all(step["num_tokens"] == 262144 for step in figures["steps"])
    assert found["strategies"]["auto"]["speedup"] > found["strategies"]["static"]["speedup"] == 1
    shown = capsys.readouterr().out
    assert "3 steps of 262,144 tokens (longest 65,536) on 16 GPUs: 16 HDP ranks" in shown
    assert "speed-up" in shown


def test_the_same_bytes_every_time(config: Path, tmp_path: Path) -> None:
    flags = ("--steps", "2", "--noise", "0.1", "--slow", "3:0.5,7:0.25")
    first = report(config, *flags)
    again = tmp_path / "again.json"
    argv = ["--config", str(config), "--gpus", "16", "--output", str(again), *flags]
    code = "import sys; from megatron_hdp.cli.main import main; sys.exit(main(sys.argv[1:]))"
    subprocess.run([sys.executable, "-c", code, "simulate", *argv], check=True)
    assert again.read_bytes() == config.with_name("report.json").read_bytes()
    assert report(config, *flags, "--seed", "1") != first
    assert report(config, "--steps", "2") != first


def test_pipelines_and_flags_behind_the_files(config: Path) -> None:
    found = report(config, "--steps", "1", "--", *TWO_STAGES)
    assert found["strategies"]["auto"]["planned_by"] == "pp-balance"
    found = report(config, "--steps", "1", "--strategies", "auto", "--", *TENSOR)
    assert list(found["strategies"]) == ["static", "auto"]


def test_overlap_is_the_configurations(config: Path) -> None:
    def sync_s(*flags: str) -> float:
        steps = report(config, "--steps", "1", *flags)["strategies"]["static"]["steps"]
        return float(steps[0]["sync_s"])

    machine = config.with_name("machine.json")
    machine.write_text(json.dumps({"gradient_buckets": 8}))
    flags = ("--machine", str(machine))
    assert 0 < sync_s(*flags, "--", "--overlap-grad-reduce") < sync_s(*flags)


def test_a_cost_model_replaces_the_configurations(config: Path) -> None:
    costs = config.with_name("costs.json")
    fast = CostModel(a=0.0, b=1e-9, kv_bytes_per_token=0.0)
    costs.write_bytes(fast.to_json())
    auto = report(config, "--steps", "1", "--cost-model", str(costs))["strategies"]["auto"]
    assert auto["steps"][0]["makespan_s"] == pytest.approx(262144 * 1e-9 / 16, rel=0.01)


def test_a_slow_rank_that_is_known_costs_less(config: Path) -> None:
    speeds = config.with_name("speeds.txt")
    speeds.write_text("\n".join("0.5" if rank == 3 else "1" for rank in range(16)))
    unknown = report(config, "--steps", "2", "--slow", "3:0.5")["strategies"]["auto"]
    known = report(config, "--steps", "2", "--rank-speeds", str(speeds))["strategies"]["auto"]
    assert known["step_time_s"] < unknown["step_time_s"]


def test_lengths_of_a_file(config: Path) -> None:
    lengths = config.with_name("lengths.txt")
    lengths.write_text("\n".join(["3000"] * 100 + ["59000"] * 3))
    steps = report(config, "--steps", "4", "--data", str(lengths))["strategies"]["auto"]["steps"]
    assert len({step["num_tokens"] for step in steps}) > 1  # drawn, again from the front
    assert all(262144 - 60000 < step["num_tokens"] <= 262144 for step in steps)
    whole = report(
        config, "--steps", "2", "--data", str(lengths), "--", "--seq-length", "32768",
        "--hdp-long-sequence", "split",
    )  # fmt: skip
    assert whole["strategies"]["auto"]["reason"] is None


def test_a_mixture_is_drawn_as_a_run_draws_it(config: Path, tmp_path: Path) -> None:
    path = data_file(write_sources(tmp_path))
    flags = ["--seed", "5", "--", "--hdp-global-batch-tokens", "700", "--seq-length", "128"]
    found = report(config, "--steps", "4", "--hdp-data", str(path), *flags)
    opening = Opening(max_length=128, long_sequence="error")
    corpus = open_corpus(read_data_file(path).training, opening)
    mixture = corpus.mixture(corpus.orders(), BatchSize(tokens=700), 5)
    position = Position()
    for step in found["strategies"]["auto"]["steps"]:
        drawn = mixture.step(position)
        assert (step["num_tokens"], step["num_sequences"]) == (drawn.tokens, len(drawn))
        position = drawn.after


@pytest.mark.parametrize(
    ("policy", "told"), [("split", "they are split into 6 sequences"), ("truncate", "each is cut")]
)
def test_what_becomes_of_sequences_beyond_the_context_is_said(
    config: Path, capsys: pytest.CaptureFixture[str], policy: str, told: str
) -> None:
    (config.parent / "long.txt").write_text("70000\n5\n200000\n")
    data = ("--data", str(config.parent / "long.txt"), "--steps", "1")
    report(config, *data, "--strategies", "static", "--", "--hdp-long-sequence", policy)
    said = f"2 of 3 sequences are longer than --seq-length 65,536: {told}"
    assert capsys.readouterr().out.startswith(said)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--strategies", "auto,fast"), "found 'fast', expected names of auto"),
        (("--slow", "3"), "found '3', expected RANK:SPEED"),
        (("--slow", "3:0"), "found '3:0', expected RANK:SPEED"),
        (("--slow", "1:1e-300"), "found '1:1e-300', expected RANK:SPEED"),
        (("--slow", "3:0.5,3:1"), "names rank 3 twice"),
        (("--slow", "16:0.5"), "--slow 16: expected an HDP rank, 0 to 15"),
        (("--noise", "-1"), "noise is -1.0; expected a sigma from 0 to 10"),
        (("--data", "preset:x"), "--data preset:x: expected preset:github or preset:byted"),
        (("--output", "here.txt"), "expected a name that ends in .json"),
        (("--report", "here.txt"), "--report here.txt: expected a name that ends in .html, .png"),
        (("--report", "no/such/r.html"), "found no folder no/such"),
        (("--report", "r.html", "--report", "./r.html"), "r.html is the file of --report as well"),
        (("--gpu-memory", "80"), "--gpu-memory"),
        (("--", "--pipeline-model-parallel-size", "8", *TENSOR), "--gpus 16 is not a multiple"),
        (("--hdp-data", "m.yaml", "--data", "preset:byted"), "expected one of them"),
    ],
)
def test_refusals(
    config: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    found = refusal(capsys, "--config", str(config), "--gpus", "16", "--steps", "1", *flags)
    assert message in found


FILES = {
    "machine.json": '{"network_bytes_per_sec": 1}',
    "costs.json": LLAMA_7B.to_json().decode(),
    "speeds.txt": "1\n1\n",
    "long.txt": "70000\n",
    "lengths.html": "5\n",
}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--machine machine.json", "'network_bytes_per_sec'; nearest is 'network_bytes_per_s'"),
        ("--rank-speeds speeds.txt", "2 speeds, expected one a line for each of 16 GPUs' HDP ran"),
        ("--data long.txt", "expected at most --seq-length 65,536: set --hdp-long-sequence"),
        ("--machine machine.json --output machine.json", "is the file of --machine as well"),
        ("--output costs.json -- --hdp-cost-model costs.json", "is the file of --cost-model as"),
        (
            "--data lengths.html --report lengths.html",
            "--report lengths.html is the file of --data",
        ),
        (
            "--output r.json --report link.html",
            "--report link.html is the file of --output as well",
        ),
    ],
)
def test_files_of_no_use_and_those_that_are_not_overwritten(
    config: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flags: str,
    message: str,
) -> None:
    monkeypatch.chdir(config.parent)
    for name, text in FILES.items():
        Path(name).write_text(text)
    Path("link.html").symlink_to("r.json")
    argv = ["--config", "small.yaml", "--gpus", "16", "--steps", "1", *flags.split()]
    assert message in refusal(capsys, *argv)
    assert {name: Path(name).read_text() for name in FILES} == FILES


def test_reports_beside_the_figures(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, picture = (config.with_name(f"run.{suffix}") for suffix in ("html", "png"))
    flags = ("--steps", "2", "--gpu-memory", "2GB", "--report", str(page))
    found = report(config, *flags, "--report", str(picture), "--", "--lr", "2e-4")
    assert f"report written to {page}\nreport written to {picture}" in capsys.readouterr().out
    text = page.read_text()
    data = data_of(text)
    charts = [one for charts in data["charts"].values() for one in charts]
    for name, figures in found["strategies"].items():
        steps = figures.pop("steps")
        assert data["figures"][name] == figures
        assert {one["title"]: one for one in charts}["Step times"]["series"][name] == [
            one["step_s"] for one in steps
        ]
    assert f"{config} --lr 2e-4; lengths: preset:github; 16 GPUs" in text
    assert "which has 2.00 GB: it would run out of memory" in text
    assert "not measured" in text
    assert picture.read_bytes()[:4] == b"\x89PNG"
    first = page.read_bytes()
    report(config, *flags, "--", "--lr", "2e-4")
    assert page.read_bytes() == first


def test_a_measured_cost_model_is_named(config: Path) -> None:
    model = config.with_name("model.json")
    model.write_text('{"a": 1e-9, "b": 1e-5, "kv_bytes_per_token": 512, "num_layers": 8}')
    page = config.with_name("run.html")
    report(config, "--steps", "1", "--cost-model", str(model), "--report", str(page))
    assert str(model) in page.read_text() and "not measured" not in page.read_text()

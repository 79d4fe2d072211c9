"""The benchmark of planners runs, and its tables say what was measured and what was not."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_hdp.planner import LLAMA_7B
from tests.support.scripts import script_module

SCRIPT = Path(__file__).parents[3] / "scripts" / "benchmarks" / "bench_planner.py"


@pytest.fixture(scope="module")
def bench():
    with script_module("benchmarks/bench_planner.py") as module:
        yield module


def rows_of(text, title):
    section = text.split(f"### {title}\n")[1].split("###")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_a_run_from_the_command_line(tmp_path):
    command = [sys.executable, str(SCRIPT), "--cases", "byted-N64-C8K", "--seeds", "2"]
    command += ["--repeats", "1", "--strategies", "static", "dp-balance"]
    command += ["--json", str(tmp_path / "results.json")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    header, _, row = rows_of(done.stdout, "Bound / makespan")
    assert header == ["case", "static", "dp-balance", "goal"]
    assert row[0] == "byted-N64-C8K" and row[3] == "mean 0.97, worst 0.95"
    assert 0 < float(row[1].split()[0]) < float(row[2].split()[0]) <= 1
    for title in ("Proven bound / makespan", "Efficiency", "Ring traffic", "Planning time"):
        assert len(rows_of(done.stdout, title)) == 3
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    assert [(one["seed"], one["strategy"]) for one in results] == [
        (seed, strategy) for seed in (0, 1) for strategy in ("static", "dp-balance")
    ]
    mean = sum(one["bound_share"] for one in results if one["strategy"] == "static") / 2
    assert row[1].startswith(f"{mean:.3f} (")


def test_the_cases_are_those_to_be_reached(bench):
    names = [case.name for case in bench.all_cases()]
    assert len(set(names)) == len(names)
    for ranks in (64, 256, 1024, 4096, 16384):
        for capacity in ("8K", "32K"):
            assert {f"github-N{ranks}-C{capacity}", f"byted-N{ranks}-C{capacity}"} <= set(names)
    assert {"python-N64-C8K", "byted-N512-C8K-32M"} <= set(names)
    assert {"byted-N64-C8K-slow", "byted-N64-C8K-slow-offload"} <= set(names)


def test_a_case_is_one_batch_a_seed(bench):
    case = bench.Case("python", 16, 1024, "")
    lengths = case.request(1).lengths
    assert 0.9 * 4 * 16 * 1024 < lengths.sum() <= 4 * 16 * 1024
    assert lengths.max() <= 16 * 1024
    assert lengths.tolist() == case.request(1).lengths.tolist()
    assert lengths.tolist() != case.request(2).lengths.tolist()
    slow = bench.Case("byted", 4, 1024, "", half_speed=True).request(0)
    assert slow.cost_model.rank_speeds == (0.5, 1.0, 1.0, 1.0)


def test_a_run_with_latency_and_noise(bench, capsys):
    common = ["--cases", "byted-N64-C8K", "--seeds", "1", "--repeats", "1"]
    common += ["--strategies", "dp-balance"]
    quiet, latent = (
        (bench.main([*common, *flags]), capsys.readouterr().out)[1]
        for flags in ([], ["--latency", "15", "25", "10", "--noise", "5", "10"])
    )
    shares = [float(rows_of(text, "Bound / makespan")[2][1].split()[0]) for text in (quiet, latent)]
    assert 0.985 <= shares[1] < shares[0]
    lost = [
        float(rows_of(latent, f"Lost to noise of {strength} %")[2][1].split()[0])
        for strength in (5, 10)
    ]
    assert 0 < lost[0] < lost[1] < 50


def test_latencies_are_those_of_the_models_layers(bench):
    latent = dataclasses.replace(LLAMA_7B, block_s=1e-5)
    case = bench.Case("github", 8, 1024, "", pipeline_stages=4, cost_model=latent)
    assert case.request(0).cost_model.num_layers == 8
    assert case.request(0).cost_model.block_s == 1e-5


def test_noise_loses_what_the_slowest_member_takes_longer(bench):
    case = bench.Case("github", 8, 1024, "")
    quiet, loud = (
        {one.strategy: one for one in bench.measure(case, 0, ["static", "auto"], 1, noise)}
        for noise in ((), (0, 5, 10))
    )
    for strategy in ("static", "auto"):
        assert quiet[strategy].lost_to_noise == {}
        assert quiet[strategy].makespan_s == loud[strategy].makespan_s
        lost = loud[strategy].lost_to_noise
        assert lost[0] == pytest.approx(0, abs=1e-12)
        assert 0 < lost[5] < lost[10] < 1
    assert loud["auto"].lost_to_noise[10] <= loud["static"].lost_to_noise[10]
    text = bench.tables([case], ["static", "auto"], list(loud.values()))
    relative, of_the_bound = (
        float(rows_of(text, f"Lost to noise of 10 %{title}")[2][1].split()[0])
        for title in ("", ", of the bound")
    )
    static = loud["static"]
    assert relative == pytest.approx(100 * static.lost_to_noise[10], abs=0.06)
    over = static.makespan_s / static.lower_bound_s
    assert of_the_bound == pytest.approx(over * 100 * static.lost_to_noise[10], abs=0.06)
    assert "noise" not in bench.tables([case], ["static"], list(quiet.values()))


def test_problems_are_marked_and_named(bench):
    one, other = (bench.Case(data, 8, 1024, "0.9") for data in ("github", "byted"))

    def result(case, seed, problem, **figures):
        named = {"case": case.name, "seed": seed, "strategy": "naive", "problem": problem}
        return bench.Result(**named, num_sequences=10, **figures)

    results = [
        result(one, 0, None, bound_share=0.6, ring_bytes=1e12),
        result(one, 1, "does not fit: 7 tokens", bound_share=0.2, ring_bytes=3e12),
        result(other, 0, "does not fit: 8 tokens"),
        result(other, 1, "another reason"),
    ]
    text = bench.tables([one, other], ["naive"], results)
    assert text.splitlines()[-2:] == [
        "- naive: 2 of 4 batches, such as github-N8-C1K, seed 1: does not fit: 7 tokens",
        "- naive: 1 of 4 batches, such as byted-N8-C1K, seed 1: another reason",
    ]
    assert [row[1] for row in rows_of(text, "Bound / makespan")[2:]] == ["0.400 (0.200)*", "-"]
    assert [row[1] for row in rows_of(text, "Ring traffic")[2:]] == ["2.0*", "-"]


@pytest.mark.slow
def test_the_step_of_a_rank():
    """What ranks tell each other to make groups grows as they do, not as all pairs of them."""
    command = [sys.executable, str(SCRIPT), "--step", "--repeats", "1"]
    command += ["--cases", "byted-N64-C8K", "byted-N1024-C8K"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [line.split("|")[1:-1] for line in done.stdout.splitlines() if "|" in line]
    sizes = {one[0].strip(): (one[2], one[4]) for one in rows}
    few, many = (int(one.replace(",", "")) for one in sizes["start: the rings' group"])
    assert 0 < few / 64 <= many / 1024 < 1.1 * few / 64
    assert all(float(one[column]) > 0 for one in rows[2:] for column in (1, 3))
    assert {"plan", "the rank's share", "start: Megatron's groups"} <= sizes.keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cases", "nothing-*"], "--cases nothing-*: no case has such a name"),
        (["--seeds", "0"], "--seeds is 0; expected at least 1"),
        (["--strategies", "best"], "invalid choice: 'best'"),
        (["--latency", "1", "-2", "3"], "--latency is 1 -2 3; expected finite numbers >= 0"),
        (["--noise", "5", "nan"], "--noise is 5 nan; expected finite numbers >= 0"),
        (["--virtual-stages", "2"], "found --virtual-stages 2; expected --pipelines with it"),
        (["--pipelines", "--virtual-stages", "0", "2"], "is 0 2; expected different numbers >= 1"),
        (["--pipelines", "--virtual-stages", "2", "2"], "is 2 2; expected different numbers >= 1"),
        (
            ["--pipelines", "--virtual-stages", "5"],
            "with 8 stages needs 40 layers; the model has 32",
        ),
        (["--pipelines", "--strategies", "static"], "expected auto among them"),
        (["--pipelines", "--noise", "5"], "found --pipelines and --noise; expected one of them"),
    ],
)
def test_bad_flags(bench, capsys, arguments, message):
    with pytest.raises((SystemExit, ValueError)) as raised:
        bench.main(arguments)
    assert message in str(raised.value) + capsys.readouterr().err


def test_cases_of_experts_are_judged_in_lockstep(bench):
    arguments = bench.parse(["--experts", "--cases", "tailed-N64-C8K-E32"])
    (case,) = bench.chosen_cases(arguments)
    request = case.request(0)
    costs = request.cost_model
    assert request.expert_parallel_size == 32 and costs.b == costs.b_experts
    apart, ours = bench.measure(case, 0, ["dp-balance", "auto"], 1)
    assert apart.bound_share < 0.9 < 0.96 < ours.bound_share <= 1
    assert ours.proven_share == ours.bound_share
    with pytest.raises(SystemExit):
        bench.parse(["--experts", "--noise", "5"])

"""Real layers and rings are timed, on one process by the command and on two ranks."""

import argparse
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from torch.utils.flop_counter import FlopCounterMode

from megatron_hdp.cli.main import main
from megatron_hdp.exit_codes import ExitCode
from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.model import building
from megatron_hdp.megatron.options import model_shape, parse_arguments
from megatron_hdp.megatron.step import setup
from megatron_hdp.planner import LLAMA_7B, CostModel
from megatron_hdp.planner.network import Nccl
from megatron_hdp.profile import command, job
from megatron_hdp.profile.cases import COMPUTE, EXPERTS, RING, Case, Room
from megatron_hdp.profile.fitting import Fit, Shape
from megatron_hdp.profile.job import run_profile
from megatron_hdp.profile.measuring import Bench
from megatron_hdp.profile.passes import FEWEST
from megatron_hdp.profile.report import intervals_of
from megatron_hdp.runtime.timeline import Timeline
from tests.profile.test_fitting import COUNTED, PLANTED
from tests.support.gradients import VOCABULARY, moe_arguments, write_corpus
from tests.support.ranks import RankError

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "configs" / "tiny-cpu.yaml")
NO_BUDGETS = ("0", "-1", "inf", "nan", "soon")
OUTSIDE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def started(*words, launcher=(), module="megatron_hdp.cli.main profile"):
    """The command in processes of its own."""
    environment = {name: value for name, value in os.environ.items() if name not in OUTSIDE}
    return subprocess.run(
        [sys.executable, "-m", *map(str, launcher), *module.split(), *map(str, words)],
        env=environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=570,
    )


def planned(path, capsys):
    """What ``plan`` says with the cost model of a file."""
    lengths = path.parent / "lengths"
    lengths.write_text("500\n300\n200\n100\n")
    words = ["--lengths", lengths, "--ranks", 2, "--tokens-per-rank", 256, "--cost-model", path]
    assert main(["plan", *map(str, words)]) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_one_process(tmp_path, capsys):
    """A real run; a busy machine may give times that are too noisy, which it must name."""
    output, picture = tmp_path / "cost-model.json", tmp_path / "profile.png"
    done = started(
        *("--config", CONFIG, "--output", output, "--picture", picture, "--budget-seconds", 0.5),
        *("--", "--hdp-tokens-per-rank", 512),
    )
    if done.returncode == ExitCode.MISTAKE:
        assert re.search("too noisy|raise --budget-seconds", done.stderr), done.stderr
        assert not output.exists()
        return
    assert done.returncode == 0, done.stderr
    model = CostModel.from_json(output)
    assert model.b > 0 and model.activation_bytes_per_token > 0 and model.host_bytes_per_s > 0
    assert (model.num_layers, model.kv_bytes_per_token) == (2, 512.0)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_files_of_a_profile(run_ranks, tmp_path, capsys):
    """The report, the cost model and the picture, of a machine with known coefficients."""
    output, picture = tmp_path / "cost-model.json", tmp_path / "profile.png"
    (profile,) = run_ranks(1, profiled, "--hdp-tokens-per-rank 512")
    command.write(profile, argparse.Namespace(output=output, picture=picture))
    text = capsys.readouterr().out
    assert "micro-batches of one rank" in text and "note: one rank has no rings" in text
    model = CostModel.from_json(output)
    assert model == profile.cost_model
    assert model.b == pytest.approx(PLANTED["b"] + PLANTED["b_experts"])
    assert (model.num_layers, model.kv_bytes_per_token) == (2, 512.0)
    assert model.host_bytes_per_s > 0 and model.activation_bytes_per_token > 0
    report = json.loads((tmp_path / "cost-model.report.json").read_text())
    assert CostModel(**report["cost_model"]) == model
    assert report["lengths"] == [16, 128] and report["degrees"] == []
    assert {len(one["seconds"]) for one in report["cases"]} == {FEWEST}
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert str(output) in planned(output, capsys)


@pytest.mark.slow
def test_times_too_noisy_to_use_are_written_by_force_only(run_ranks, tmp_path, capsys):
    """Planted noise: e^2 times as long, or a seventh; each rank refuses, after three tries."""
    with pytest.raises(RankError, match=r"too noisy .*measured 3 times"):
        run_ranks(1, profiled, f"{SMALL} 1", noise=2.0)
    output = tmp_path / "cost-model.json"
    (profile,) = run_ranks(1, profiled, f"{SMALL} 1", noise=2.0, force=True)
    command.write(profile, argparse.Namespace(output=output, picture=None))
    assert "note: written by --force" in capsys.readouterr().out
    assert "too noisy" in CostModel.from_json(output).doubt


@pytest.mark.parametrize(
    ("config", "words", "told"),
    [
        (CONFIG, "--output gone/c.json", "--output gone/c.json: found no folder gone, expected"),
        (CONFIG, "--output .", "found a folder, expected a file's name"),
        (CONFIG, "--output pipe", "found a device or a pipe, expected a file"),
        (CONFIG, "--output c.json --picture c.txt", "found the suffix '.txt', expected .png, .svg"),
        (CONFIG, "--output c.png --picture ./c.png", "c.png is the file of --output as well"),
        ("small.yaml", "--output c.json", "--hybrid-data-parallel needs --hdp-tokens-per-rank"),
        ("wrong.yaml", "--output c.json", "num-layer"),
        ("gone.yaml", "--output c.json", "gone.yaml"),
        *((CONFIG, f"--output o --budget-seconds={one}", "--budget-seconds") for one in NO_BUDGETS),
    ],
)
def test_a_mistake_is_one_line(config, words, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines = Path(CONFIG).read_text().splitlines()
    kept = [line for line in lines if "hdp-tokens-per-rank" not in line]
    Path("small.yaml").write_text("\n".join(kept))
    os.mkfifo("pipe")
    Path("wrong.yaml").write_text("num-layer: 2\n")
    try:
        code = main(["profile", "--config", config, *words.split()])
    except SystemExit as leaving:  # argparse's way
        code = leaving.code
    assert code == 2
    assert told in capsys.readouterr().err
    assert not Path("c.json").exists()


class PlantedTimes:
    """Real cases take what a machine with known coefficients takes, the same on all ranks."""

    def __init__(self, noise):
        self._noise, self._rng = noise, np.random.default_rng(0)

    def seconds(self, bench, case):
        assert bench._runs[case.kind](case) >= 0.0
        machine = Fit(PLANTED, Shape(bench._arguments.num_layers, COUNTED))
        taken_s = machine.predicted_s(case) * self._rng.lognormal(0, self._noise)
        bench.elapsed_s += taken_s
        return taken_s


def profiled(flags, noise=0.0, config=CONFIG, force=False):
    """Body of a rank."""
    words = ("--config", config, "--hybrid-data-parallel", *flags.split())
    arguments, times = parse_arguments(words, needs_data=False), PlantedTimes(noise)
    with mock.patch.object(Bench, "seconds", lambda bench, case: times.seconds(bench, case)):
        return run_profile(arguments, 0.01, lambda *_: None, force=force)


SMALL = "--hdp-tokens-per-rank 128 --hidden-size 16 --num-layers"


def test_ranks_find_the_same_and_a_degree_between(run_ranks):
    """Three ranks, of which one stands aside in the rings of two."""
    profiles = run_ranks(3, profiled, f"{SMALL} 1")
    assert len({one.cost_model for one in profiles}) == 1
    first = profiles[0]
    assert {one.case.degree for one in first.measured if one.case.kind == RING} == {2, 3}
    assert "inter_hop" not in first.fit.values and "intra_hop" in first.fit.values
    model = first.cost_model
    assert model.inter_node_bytes_per_s == model.intra_node_bytes_per_s
    assert model.ranks_per_node == 3
    assert any(note.startswith("one node: ") for note in first.notes)


@pytest.mark.slow
def test_virtual_stages_are_profiled_in_one_part(run_ranks):
    """What a rank counts and measures is that of all its parts of the model."""
    flags = f"{SMALL} 4 --pipeline-model-parallel-size 2"
    virtual = f"{flags} --num-virtual-stages-per-pipeline-rank 2"
    plain, parted = (run_ranks(2, profiled, one)[0] for one in (flags, virtual))
    assert parted.room == plain.room and parted.place == plain.place
    for name in ("num_layers", "kv_bytes_per_token", "activation_bytes_per_token"):
        assert getattr(parted.cost_model, name) == getattr(plain.cost_model, name)
    assert parted.cost_model.num_layers == 2


def test_uneven_pipeline_stages(run_ranks):
    """The first stage of two holds no layer, the second all three in two parts."""
    flags = f"{SMALL} 3 --pipeline-model-parallel-size 2"
    first, second = run_ranks(2, profiled, f"{flags} --pipeline-model-parallel-layout E|t*2||tL")
    assert first.cost_model == second.cost_model
    model = first.cost_model
    assert model.num_layers == 3  # of the stage that has most, all its parts
    assert model.kv_bytes_per_token == 3 * 2 * 8 * 4
    assert model.activation_bytes_per_token > 0


SLEEPS = """
import os, sys, time
from megatron_hdp.profile import __main__ as command
from megatron_hdp.profile.measuring import Bench

if os.environ["RANK"] == "1":
    Bench._attention_s = lambda self, case: time.sleep(600)
sys.argv[0] = "profile"
command.run()
"""


TOKENS = 24


def measured(arguments):
    """Body of a rank: operations instead of seconds."""
    parallel.initialise(arguments)
    parallel.set_seeds(1)
    chunks = building.build_chunks(arguments, VOCABULARY)
    bench = Bench(arguments, setup.build_executor(arguments, chunks, Timeline()), VOCABULARY)
    with mock.patch.object(Bench, "_timed", operations_of):
        return bench._experts_s(Case(EXPERTS, (TOKENS,)))


def operations_of(bench, run):
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = mock.MagicMock(parents={"Global"})  # the real one bars autograd.grad
    with counter:
        run()
    return counter.get_total_flops()


def test_neither_shared_experts_nor_dense_layers_count(run_ranks, tmp_path):
    more = {"num_layers": 3, "moe_layer_freq": "[0]+[1]*2"}
    more |= {"moe_shared_expert_intermediate_size": 20, "moe_shared_expert_gate": True}
    stages = {"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 2}
    prefix = write_corpus(tmp_path, [TOKENS])
    for ranks, layout in ((1, {}), (2, stages)):
        arguments = moe_arguments(prefix, **more | layout)
        shape = model_shape(arguments, 0)
        routers = 2 * arguments.hidden_size * arguments.num_experts
        met = shape.expert_parameters + routers
        assert run_ranks(ranks, measured, arguments) == [6 * TOKENS * met] * ranks


@pytest.mark.slow  # their case is above, their fit in test_fitting.py
def test_experts_have_a_share_of_their_own(run_ranks):
    """Two ranks that share the experts, whose tokens are most of the work."""
    flags = f"""{SMALL} 1 --hdp-tokens-per-rank 256 --seq-length 512
        --num-experts 4 --moe-ffn-hidden-size 2048 --moe-router-topk 2
        --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2
        --moe-router-load-balancing-type none"""
    first, second = run_ranks(2, profiled, flags)
    assert first.cost_model == second.cost_model
    assert {one.case.kind for one in first.measured} >= {COMPUTE, EXPERTS, RING}
    assert first.cost_model.b == pytest.approx(PLANTED["b"])
    assert first.cost_model.b_experts == pytest.approx(PLANTED["b_experts"])
    assert "b_experts" in intervals_of(first)


@pytest.mark.slow
def test_of_latent_attention_keys_and_values_are_measured(run_ranks, tmp_path):
    """Heads of two sizes; what a ring that passes latents on costs is added where a run begins."""
    lines = [one for one in Path(CONFIG).read_text().splitlines() if "query" not in one]
    config = tmp_path / "latent.yaml"
    config.write_text("\n".join(lines))
    flags = f"""{SMALL} 1 --multi-latent-attention --kv-lora-rank 8 --qk-head-dim 8
        --qk-pos-emb-head-dim 4 --v-head-dim 6 --num-attention-heads 2 --hdp-mla-ring latent"""
    found = {one.cost_model for one in run_ranks(2, profiled, flags, config=str(config))}
    (model,), heads = found, 2
    assert model.kv_bytes_per_token == heads * (8 + 4 + 6) * 4


@pytest.mark.slow
def test_a_rank_that_hangs_is_named(tmp_path):
    script, output = tmp_path / "sleeps.py", tmp_path / "cost-model.json"
    script.write_text(SLEEPS)
    done = started(
        *(script, "--config", CONFIG, "--output", output, "--hdp-tokens-per-rank", 128),
        *("--num-layers", 1, "--hidden-size", 16, "--stall-timeout-seconds", 3),
        launcher=("torch.distributed.run", "--standalone", "--nproc-per-node", 2),
        module="",
    )
    assert done.returncode != 0
    assert "stalled while 1 of 2 ranks wait: rank 1 (" in done.stderr
    assert not output.exists()


@pytest.mark.slow
def test_two_ranks_tell_what_the_fit_has_not_seen(tmp_path, capsys):
    """The bounds are wide: other work may share the cores."""
    output = tmp_path / "cost-model.json"
    done = started(
        *("--config", CONFIG, "--output", output, "--budget-seconds", 40),
        launcher=("torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m"),
        module="megatron_hdp.profile",
    )
    assert done.returncode == 0, done.stderr
    assert "micro-batches of rings" in done.stdout
    model = CostModel.from_json(output)
    assert model.ranks_per_node == 2 and model.block_s > 0
    report = json.loads((tmp_path / "cost-model.report.json").read_text())
    assert report["degrees"] == [2] and report["lengths"] == [64, 2048]
    held_out = [one for one in report["cases"] if one["is_held_out"]]
    assert {one["kind"] for one in held_out} == {COMPUTE, RING}
    assert np.median([abs(one["error"]) for one in held_out]) <= 0.25
    assert str(output) in planned(output, capsys)


def test_the_channels_of_a_measurement_are_in_its_file(monkeypatch):
    """On one node of eight; a job of more nodes then has less, see `planner.network.channels`."""
    monkeypatch.setattr(job, "coefficients_of", lambda fit: {"intra_node_hop_s": 1e-6})
    monkeypatch.setattr(job.parallel, "nccl_of_rings", lambda arguments: Nccl((2, 30, 7), True, 16))
    counted = replace(LLAMA_7B, slowed="of the job that measured")
    for ranks, channels in ((8, 16), (16, 4), (1, 0)):
        room = Room(2048, 8192, ranks=ranks, ranks_per_node=8)
        found, _ = job._cost_model(counted, None, room, None)
        assert (found.channels, found.slowed) == (channels, "")

"""Training, ``check``, ``simulate`` and ``plan --model`` plan a configuration with the same costs.

Two figures are not compared. Training counts activations that are to be offloaded on the model as
it was built; here it is given the formula's, to which `test_activation_formula` holds the built
ones. The parameters of named models are the paper's nominal ones.
"""

import argparse
import re
from dataclasses import asdict, replace
from types import SimpleNamespace
from unittest import mock

import pytest

from megatron_hdp.cli import simulated_run
from megatron_hdp.cli.checking import checks, job_of
from megatron_hdp.cli.main import main
from megatron_hdp.cli.shared.models import find_model
from megatron_hdp.megatron.options import parse_arguments, vocab_size_of
from megatron_hdp.megatron.parallel import RankPlace
from megatron_hdp.megatron.step import setup
from megatron_hdp.planner import LLAMA_7B
from megatron_hdp.planner.memory import kept_after_forward
from megatron_hdp.planner.network import Nccl
from megatron_hdp.planner.shape import MODELS
from megatron_hdp.runtime.attention import AttentionByLatent
from tests.cli.test_check import CONFIGS

PATHS = sorted(
    path for path in CONFIGS.rglob("*.yaml") if path.parent.name not in ("models", "primitives")
)
NAMES = [str(path.relative_to(CONFIGS).with_suffix("")) for path in PATHS]
FULL = {"recompute-granularity": "full", "recompute-method": "block", "recompute-num-layers": 2}
RECOMPUTED = {
    "as it is": {},
    "selective": {"recompute-granularity": "selective"},
    "full": FULL | {"recompute-method": "uniform", "recompute-num-layers": 1},
    "block": FULL,
}


RECOMPUTING = {
    one for one in NAMES if one.endswith("1m") and ("qwen3-235b" in one or "llama-3.1-70b" in one)
}


def costs_of(path, recomputed, monkeypatch):
    """The cost model of a configuration by command, recomputing so."""
    flags = [word for name, value in recomputed.items() for word in (f"--{name}", str(value))]
    arguments = parse_arguments(
        ["--config", str(path), "--hybrid-data-parallel", "--data-path", "unused", *flags]
    )
    found = re.search(r"--gpus (\d+)", path.read_text())
    num_gpus = int(found[1]) if found else 4
    job = job_of(arguments, num_gpus)
    flags = {"config": [str(path)], "flags": flags, "gpus": num_gpus, "noise": 0.0, "seed": 0}
    flags |= {"cost_model": None, "rank_speeds": None, "machine": None}
    asked = argparse.Namespace(**flags)
    return {
        "training": in_training(arguments, job, monkeypatch),
        "check": checks.cost_model_of(arguments, job),
        "simulate": simulated_run.setting_of(asked, simulated_run.options_of(asked), {}).cost_model,
    }


def in_training(arguments, job, monkeypatch):
    latent = mock.create_autospec(AttentionByLatent, instance=True)
    executor = SimpleNamespace(
        place=RankPlace(
            hdp_rank=0,
            num_hdp_ranks=job.hdp_ranks,
            stage=0,
            num_stages=job.stages,
            tensor_rank=0,
            num_tensor_ranks=job.tensor_ranks,
            lockstep_ranks=1,
            token_multiple=1,
        ),
        chunks=[SimpleNamespace(vocab_size=vocab_size_of(arguments))],
        attention=latent if job.shape.latent_size and arguments.hdp_mla_ring != "kv" else None,
        layers=job.shape.layers,
        activation_bytes_per_token=lambda: kept_after_forward(job),
    )
    monkeypatch.setattr(setup, "over_all_ranks", lambda sums, *_: sums)
    monkeypatch.setattr(setup, "_on_nodes", lambda cost_model, _: cost_model)  # needs the groups
    return setup.cost_model_of(arguments, executor)


def differences(costs):
    """Figures of the three commands that are not equal."""
    assert len({one.slowed for one in costs.values()}) == 1
    fields = [asdict(one) | {"doubt": 0, "slowed": 0} for one in costs.values()]
    return [
        name
        for name in fields[0]
        if any(one[name] != pytest.approx(fields[0][name], rel=1e-12) for one in fields)
    ]


@pytest.mark.parametrize(
    ("path", "recomputed"),
    [
        pytest.param(
            *(path, flags),
            id=f"{name}, {how}",
            # a model's contexts differ in little
            marks=pytest.mark.slow if flags and name not in RECOMPUTING else (),
        )
        for path, name in zip(PATHS, NAMES, strict=True)
        for how, flags in RECOMPUTED.items()
    ],
)
def test_every_command_plans_with_the_same_costs(path, recomputed, monkeypatch):
    costs = costs_of(path, recomputed, monkeypatch)
    assert differences(costs) == []
    argv = ["--config", str(path), "--hybrid-data-parallel", "--data-path", "x"]
    arguments = parse_arguments(argv)
    tensor_ranks = arguments.tensor_model_parallel_size
    model, check = find_model(str(path)), costs["check"]
    plan = model.cost_model()  # a GPU is a rank, which recomputes nothing
    attention = 1 if not recomputed else check.a * tensor_ranks / plan.a
    assert check.a * tensor_ranks == pytest.approx(attention * plan.a)
    if not recomputed:
        padding = 1e-3  # of a vocabulary that is a multiple of the tensor ranks
        assert check.b * tensor_ranks == pytest.approx(plan.b, rel=padding)
        assert check.b_experts * tensor_ranks == pytest.approx(plan.b_experts)
        assert check.window_share == plan.window_share
        if not model.shape.latent_size and arguments.bf16:
            assert check.kv_bytes_per_token == plan.kv_bytes_per_token
    name = re.sub(r"(-ep8)?-\d+[km]$", "", path.stem)
    if name in MODELS and not recomputed:
        named = MODELS[name].cost_model()
        assert check.a * tensor_ranks == pytest.approx(named.a)
        assert check.b_experts * tensor_ranks == pytest.approx(named.b_experts)
        assert check.kv_bytes_per_token == named.kv_bytes_per_token


@pytest.mark.parametrize("flags", [{"lora-rank": 16}, {"hdp-frozen": "*.mlp.*"}])
def test_every_command_knows_what_is_trained(flags, monkeypatch):
    config = CONFIGS / "bytescale/llama-7b-256k.yaml"
    costs = costs_of(config, flags, monkeypatch)
    assert differences(costs) == []
    whole = costs_of(config, {}, monkeypatch)["check"]
    assert 0.6 < costs["check"].b / whole.b < 0.95
    assert costs["check"].a == whole.a


def test_every_command_plans_with_the_channels_that_nccl_gives(monkeypatch, capsys):
    """On two nodes; what runs the rings in training is what is installed for the commands."""
    old, config = Nccl((2, 27, 7), False, 16), CONFIGS / "bytescale/llama-7b-256k.yaml"
    whole = costs_of(config, {}, monkeypatch)
    monkeypatch.setattr(Nccl, "installed", lambda max_ctas: old)
    monkeypatch.setattr(setup, "nccl_of_rings", lambda arguments: old)
    monkeypatch.setattr(setup, "say", print)
    costs = costs_of(config, {}, monkeypatch)
    assert differences(costs) == []
    assert costs["check"].inter_node_bytes_per_s < whole["check"].inter_node_bytes_per_s
    assert capsys.readouterr().out.count("rings are planned at") == 1  # training
    for command in (
        "plan --lengths preset:github --ranks 64 --tokens-per-rank 8192",
        f"check {config} --gpus 1024",
    ):
        assert main(command.split()) == 0
        assert capsys.readouterr().out.count("rings are planned at") == 1, command


def test_a_doubtful_cost_model_is_named_by_whoever_reads_it(tmp_path, monkeypatch, capsys):
    """What `profile --force` writes: by ``plan``, ``check``, ``simulate``, their page, training."""
    path, config = tmp_path / "costs.json", CONFIGS / "tiny-cpu.yaml"
    path.write_bytes(replace(LLAMA_7B, doubt="six processes were busy", num_layers=1).to_json())
    more = tmp_path / "more.yaml"
    more.write_text(f"hdp-cost-model: {path}\n")
    (tmp_path / "lengths").write_text("100\n")
    page = tmp_path / "page.html"
    for command in (
        f"plan --lengths {tmp_path}/lengths --ranks 2 --tokens-per-rank 100 --cost-model {path}",
        f"check {config} {more} --gpus 4",
        f"simulate --config {config} --config {more} --gpus 4 --steps 1 --strategies static "
        f"--report {page}",
    ):
        assert main(command.split()) == 0
        assert "written by profile --force: six processes" in capsys.readouterr().out, command
    assert "written by profile --force: six processes" in page.read_text()
    argv = ["--config", str(config), "--config", str(more), "--hybrid-data-parallel"]
    arguments = parse_arguments([*argv, "--data-path", "x"])
    said = []
    monkeypatch.setattr(setup, "say", said.append)
    in_training(arguments, job_of(arguments, 4), monkeypatch)
    assert ["six processes" in line for line in said] == [True]


RECOMPUTED_A = {"as it is": 1, "selective": 4 / 3, "full": 4 / 3, "block": 1 + 2 * 2 / 32 / 3}


@pytest.mark.parametrize("name", RECOMPUTED)
def test_recomputation_costs_what_runs_again(name, tmp_path, monkeypatch):
    """Two stages of 16 layers: with `block`, two of each run once more."""
    path = tmp_path / "staged.yaml"
    path.write_text(
        f"config: {CONFIGS / 'bytescale/llama-7b-256k.yaml'}\npipeline-model-parallel-size: 2\n"
        "hdp-offload: 'off'\n"
    )
    plain = costs_of(path, {}, monkeypatch)["training"]
    found = costs_of(path, RECOMPUTED[name], monkeypatch)["training"]
    assert found.a / plain.a == pytest.approx(RECOMPUTED_A[name])
    embedding, layers = 128_256 * 4096, 32 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 11008)
    of_layers = 1 if name == "selective" else RECOMPUTED_A[name]
    assert plain.b * 400e12 * 2 == pytest.approx(6 * (layers + embedding))  # two tensor ranks
    assert found.b * 400e12 * 2 == pytest.approx(6 * (of_layers * layers + embedding))


@pytest.mark.parametrize(
    ("target", "fault"),
    [
        (setup, lambda job: replace(job, recompute=None)),
        (setup, lambda job: replace(job, shape=replace(job.shape, vocab_size=256_512))),
        (checks, lambda job: replace(job, recompute=None)),
        (simulated_run, lambda job: replace(job, tensor_ranks=1)),
    ],
    ids=["training forgets", "training counts the embedding", "check forgets", "simulate forgets"],
)
def test_one_that_counts_otherwise_is_noticed(target, fault, monkeypatch):
    name = "cost_model_of_job" if target is setup else "cost_model_of"
    counted = getattr(target, name)
    monkeypatch.setattr(
        target, name, lambda arguments, job, *kept: counted(arguments, fault(job), *kept)
    )
    path = CONFIGS / "bytescale" / "llama-7b-256k.yaml"
    assert "b" in differences(costs_of(path, FULL, monkeypatch))

"""Experts of a stock Megatron-LM across ranks: the losses of one rank that has all of them."""

from functools import partial

import pytest
import torch

from tests.megatron.lm.runs import (
    HDP,
    LENGTHS,
    MARKS,
    MODEL,
    TENSOR,
    drive,
    planned,
    require_same,
    scalars,
    weights,
)
from tests.support.gradients import write_corpus

pytestmark = MARKS

EXPERTS = f"""{MODEL} --num-experts 4 --moe-router-load-balancing-type seq_aux_loss
--moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3 --moe-token-dispatcher-type alltoall"""
DEEPSEEK = f"""{EXPERTS} --num-layers 3 --moe-layer-freq [0]+[1]*2 --ffn-hidden-size 48
--moe-ffn-hidden-size 24 --moe-shared-expert-intermediate-size 20 --moe-shared-expert-gate
--moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5
--moe-router-num-groups 2 --moe-router-group-topk 1
--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.05"""
GPT_OSS = f"""{EXPERTS.replace("--swiglu", "").replace("--disable-bias-linear", "")} --quick-geglu
--activation-func-clamp-value 0.4 --glu-linear-offset 1.0"""
ACROSS = ["--expert-model-parallel-size", "2"]
STAGES = ["--pipeline-model-parallel-size", "2", "--decoder-first-pipeline-num-layers", "1"]
APART = [*TENSOR, "--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "1"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All runs of this file."""
    folder = tmp_path_factory.mktemp("megatron-lm")
    write_corpus(folder, LENGTHS)
    run = partial(planned, folder, model=EXPERTS)
    drive(
        folder,
        [
            run("first", 1, [*HDP, "256"], save="experts"),
            run("one", 1, [*HDP, "256", "--finetune"], load="experts"),
            run("apart", 4, [*HDP, "256", "--finetune", *APART], load="experts"),
            *of_model(folder, "deepseek", DEEPSEEK, 4, [*ACROSS, *STAGES]),
            *of_model(folder, "gpt-oss", GPT_OSS, 4, APART),
        ],
    )
    return folder


def of_model(folder, name, model, ranks, layout):
    """Runs from the weights of a first one: on one rank, and on several."""
    run = partial(planned, folder, model=model)
    on = [*HDP, "256", "--finetune"]
    return [
        run(f"{name} first", 1, [*HDP, "256"], save=f"{name} weights", steps=3),
        run(f"{name} one", 1, on, load=f"{name} weights", save=f"{name} of one"),
        run(f"{name} apart", ranks, [*on, *layout], load=f"{name} weights", save=f"{name} apart"),
    ]


def test_experts_across_ranks_are_those_of_one(runs):
    one, apart = scalars(runs, "one"), scalars(runs, "apart")
    require_same(apart, one, rel=1e-5)
    for tag in ("seq_load_balancing_loss", "z_loss"):  # as Megatron logs them
        for step, value in one[tag].items():
            assert apart[tag][step] == pytest.approx(value, rel=1e-5)
    assert all(1 <= value < 2 for value in one["seq_load_balancing_loss"].values())


@pytest.mark.parametrize("name", ["deepseek", "gpt-oss"])
def test_models_of_today_across_ranks_are_those_of_one(runs, name):
    one, apart = scalars(runs, f"{name} one"), scalars(runs, f"{name} apart")
    require_same(apart, one, rel=1e-5)
    for step, value in one["seq_load_balancing_loss"].items():  # a mean over the sparse layers
        assert 1 <= value < 2
        assert apart["seq_load_balancing_loss"][step] == pytest.approx(value, rel=1e-5)


def test_biases_of_experts_move_as_on_one_rank(runs):
    one, apart = (weights(runs, f"deepseek {name}") for name in ("of one", "apart"))
    names = [name for name in one if name.endswith("router.expert_bias")]
    assert names and not any(name.startswith("optimizer") for name in names)
    for name in names:
        assert one[name].abs().min() >= 0.05 - 1e-6  # an odd number of steps, one run and the next
        assert torch.equal(apart[name], one[name])

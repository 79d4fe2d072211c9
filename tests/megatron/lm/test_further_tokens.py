"""Layers of further tokens in a stock Megatron-LM: its own parameters, the losses of one rank.

Needs what test_training.py needs.
"""

from functools import partial

import pytest

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

pytestmark = [*MARKS, pytest.mark.slow]

MODEL = f"""{MODEL} --mtp-num-layers 2 --mtp-loss-scaling-factor 0.7
--make-vocab-size-divisible-by 128"""
EXPERTS = f"""{MODEL} --num-experts 4 --moe-layer-freq [0,1] --moe-router-topk 2
--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2
--moe-token-dispatcher-type alltoall"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All runs of this file."""
    folder = tmp_path_factory.mktemp("megatron-lm")
    write_corpus(folder, LENGTHS)
    run = partial(planned, folder, model=MODEL)
    stages = ["--pipeline-model-parallel-size", "2", "--use-distributed-optimizer"]
    apart = ["--expert-model-parallel-size", "2"]
    drive(
        folder,
        [
            run("stock", 1, [], plugin=False, save="stock", steps=2),
            run("one", 1, [*HDP, "256", "--finetune"], load="stock", save="one"),
            run("two", 2, [*HDP, "160", "--finetune"], load="stock"),
            run("tensor", 2, [*HDP, "256", *TENSOR, "--finetune"], load="stock"),
            run("stages", 4, [*HDP, "160", *stages, "--finetune"], load="stock"),
            run("experts first", 1, [*HDP, "256"], model=EXPERTS, save="experts", steps=2),
            *(
                run(name, ranks, [*HDP, "256", "--finetune", *more], model=EXPERTS, load="experts")
                for name, ranks, more in (("experts one", 1, []), ("experts apart", 2, apart))
            ),
        ],
    )
    return folder


def test_parameters_keep_stocks_names_and_shapes(runs):
    stock, ours = weights(runs, "stock", iteration=2), weights(runs, "one")
    assert any(name.startswith("mtp.layers.1") for name in stock)
    assert {name: value.shape for name, value in ours.items()} == {
        name: value.shape for name, value in stock.items()
    }


@pytest.mark.parametrize("name", ["two", "tensor", "stages"])
def test_losses_and_norms_are_those_of_one_rank(runs, name):
    # Adam steps by the sign of gradients next to nothing, which are float32 noise
    require_same(scalars(runs, name), scalars(runs, "one"), rel=1e-4)


def test_experts_apart_are_those_of_one_rank(runs):
    require_same(scalars(runs, "experts apart"), scalars(runs, "experts one"), rel=1e-5)

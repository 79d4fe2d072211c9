"""Windows and sinks in a stock Megatron-LM: its own parameters, the losses of one rank.

Needs what test_training.py needs.
"""

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
    require_same_states,
    scalars,
    weights,
)
from tests.support.gradients import write_corpus

pytestmark = [*MARKS, pytest.mark.slow]

MODEL = f"""{MODEL} --softmax-type learnable --window-size 31,0 --window-attn-skip-freq [1,0]
--make-vocab-size-divisible-by 384"""
SINKS = "decoder.layers.self_attention.core_attention.softmax_offset"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All runs of this file."""
    folder = tmp_path_factory.mktemp("megatron-lm")
    write_corpus(folder, LENGTHS)
    run = partial(planned, folder, model=MODEL)
    stages = ["--pipeline-model-parallel-size", "2", "--use-distributed-optimizer"]
    tensor = [*TENSOR, "--make-vocab-size-divisible-by", "192"]
    drive(
        folder,
        [
            run("stock", 1, [], plugin=False, save="stock", steps=2),
            run("one", 1, [*HDP, "256", "--finetune"], load="stock", save="one"),
            run("two", 2, [*HDP, "160", "--ckpt-step", "2"], load="one", save="two"),
            run("tensor", 2, [*HDP, "256", *tensor, "--ckpt-step", "2"], load="one", save="tensor"),
            run("stages", 4, [*HDP, "160", *stages, "--finetune"], load="stock", save="stages"),
        ],
    )
    return folder


def test_parameters_keep_stocks_names_and_shapes(runs):
    stock, ours = weights(runs, "stock", iteration=2), weights(runs, "one")
    assert SINKS in stock and stock[SINKS].shape == (2, 4)
    assert stock.keys() == ours.keys()
    assert all(stock[name].shape == value.shape for name, value in ours.items())
    assert not torch.equal(stock[SINKS], ours[SINKS])  # it learns


@pytest.mark.parametrize("name", ["two", "tensor"])
def test_losses_and_states_of_one_rank(runs, name):
    require_same(scalars(runs, name), scalars(runs, "one"), rel=2e-6, steps=(3, 4))
    require_same_states(runs, name, "one", iteration=4, rel=1e-4)


def test_losses_of_stages(runs):
    require_same(scalars(runs, "stages"), scalars(runs, "one"), rel=2e-6)

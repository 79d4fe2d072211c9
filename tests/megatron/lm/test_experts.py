"""Experts of a stock Megatron-LM across ranks: the losses of one rank that has all of them."""

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
)
from tests.support.gradients import write_corpus

pytestmark = MARKS

EXPERTS = f"""{MODEL} --num-experts 4 --moe-router-load-balancing-type seq_aux_loss
--moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3 --moe-token-dispatcher-type alltoall"""
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
        ],
    )
    return folder


def test_experts_across_ranks_are_those_of_one(runs):
    one, apart = scalars(runs, "one"), scalars(runs, "apart")
    require_same(apart, one, rel=1e-5)
    for tag in ("seq_load_balancing_loss", "z_loss"):  # as Megatron logs them
        for step, value in one[tag].items():
            assert apart[tag][step] == pytest.approx(value, rel=1e-5)
    assert all(1 <= value < 2 for value in one["seq_load_balancing_loss"].values())

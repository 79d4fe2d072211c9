"""Experts under HDP: what routers refuse, and the parameters that a token meets."""

import pytest
import torch

from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.model import building
from tests.support.gradients import VOCABULARY, moe_arguments, write_corpus


def refusals(prefix):
    """Body of a rank: what is said to losses that depend on the plan, and without micro-batch."""
    said = []
    for kind in ("aux_loss", "global_aux_loss"):
        arguments = moe_arguments(prefix, moe_router_load_balancing_type=kind)
        parallel.initialise(arguments)
        parallel.set_seeds(1)
        with pytest.raises(ValueError) as error:
            building.build_gpt(arguments, VOCABULARY)
        said.append(str(error.value))
        parallel.finish()
    arguments = moe_arguments(prefix)
    parallel.initialise(arguments)
    parallel.set_seeds(1)
    router = building.build_gpt(arguments, VOCABULARY).module.decoder.layers[0].mlp.router
    with pytest.raises(RuntimeError) as error:
        router(torch.ones(3, 1, arguments.hidden_size, dtype=torch.float64))
    return [*said, str(error.value)]


def test_what_the_router_refuses(run_ranks, tmp_path):
    aux, global_aux, outside = run_ranks(1, refusals, write_corpus(tmp_path, [5]))[0]
    assert "does not support aux_loss, whose effect depends on the plan; use seq_aux_loss" in aux
    assert "does not support global_aux_loss" in global_aux
    assert "knows no micro-batch" in outside


def initialise(arguments):
    parallel.initialise(arguments)


def test_ranks_that_cannot_share_the_experts_are_refused(run_ranks, tmp_path):
    arguments = moe_arguments(write_corpus(tmp_path, [5]), expert_model_parallel_size=2)
    with pytest.raises(
        Exception, match="3 ranks of a pipeline stage cannot be cut into groups of 2 that"
    ):
        run_ranks(3, initialise, arguments)

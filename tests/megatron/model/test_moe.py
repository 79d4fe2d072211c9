"""Experts under HDP: what routers refuse, and the parameters that a token meets."""

from dataclasses import replace

import pytest
import torch

from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.model import building
from megatron_hdp.megatron.options import model_shape
from megatron_hdp.planner.shape import Weights
from tests.gradient_equivalence.cases import ACROSS, EXPERT_MODELS, TENSOR, UNEVEN
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


def parameters_of(runs):
    """Body of a rank: what the cost model takes for the parameters of each model."""
    counts = []
    for run in runs:
        parallel.initialise(run)
        parallel.set_seeds(1)
        counts.append(parallel.num_parameters(building.build_chunks(run, VOCABULARY)))
        parallel.finish()
    return counts


def test_a_token_meets_the_experts_it_goes_to(run_ranks, tmp_path):
    alone = moe_arguments(write_corpus(tmp_path, [5]))
    spread = [
        replace(alone, expert_model_parallel_size=2),
        replace(alone, num_experts=8, moe_router_topk=1, moe_router_pre_softmax=True),
        replace(alone, pipeline_model_parallel_size=2),
        replace(alone, **TENSOR, expert_model_parallel_size=2),
    ]
    first, *others = run_ranks(2, parameters_of, [alone, *spread])[0]
    layers, hidden, expert = 2, 16, 3 * 16 * 12
    norms, router = (2 * layers + 1) * hidden, 4 * hidden
    embeddings, attention = 2 * 384 * hidden, 2 * 16 * 16 + 2 * 8 * 16
    dense, experts = embeddings + norms + layers * (attention + router), layers * 2 * expert
    assert first == (dense, experts)
    assert others == [
        first,
        (dense + layers * router, experts // 2),
        first,
        (dense + norms + layers * router, experts),
    ]


def test_ranks_that_cannot_share_the_experts_are_refused(run_ranks, tmp_path):
    arguments = moe_arguments(write_corpus(tmp_path, [5]), expert_model_parallel_size=2)
    with pytest.raises(
        Exception, match="3 ranks of a pipeline stage cannot be cut into groups of 2 that"
    ):
        run_ranks(3, initialise, arguments)


def test_only_routed_experts_of_sparse_layers_are_shared(run_ranks, tmp_path):
    alone = moe_arguments(write_corpus(tmp_path, [5]), **EXPERT_MODELS["deepseek"])
    runs = [alone, replace(alone, **ACROSS), replace(alone, **UNEVEN)]
    counts = run_ranks(2, parameters_of, runs)[0]
    shape = model_shape(alone, building.padded_vocab_size(VOCABULARY, alone))
    dense = sum((layer.weights for layer in shape.layers), Weights())
    others = dense.split + dense.whole + 2 * shape.embedding + shape.last_norm
    assert counts == [(others, shape.expert_parameters)] * 3

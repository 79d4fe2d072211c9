"""Experts under HDP: which kinds are known, and what routers refuse."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.model import building
from megatron_hdp.megatron.model.moe import HdpMoeTransformerLayer, without_shared_experts
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


class GroupedMLP(torch.nn.Module):
    """Megatron 0.16's experts by another package's kernel have this name."""


@pytest.mark.parametrize("kind", [SequentialMLP, TEGroupedMLP, GroupedMLP])
def test_other_kinds_of_experts_are_refused(kind):
    layer = TransformerLayer.__new__(TransformerLayer)
    torch.nn.Module.__init__(layer)
    layer.layer_number, layer.mlp = 3, torch.nn.Module()
    layer.mlp.router, layer.mlp.experts = TopKRouter.__new__(TopKRouter), kind.__new__(kind)
    with mock.patch("megatron_hdp.megatron.model.router.HdpRouter.adopt") as adopt:
        if kind is not GroupedMLP:
            HdpMoeTransformerLayer.adopt(layer)
            assert adopt.called and type(layer) is HdpMoeTransformerLayer
            return
        expected = "layer 3: found .* GroupedMLP, expected SequentialMLP or TEGroupedMLP"
        with pytest.raises(ValueError, match=expected):
            HdpMoeTransformerLayer.adopt(layer)
    assert type(layer) is TransformerLayer


def test_routed_experts_are_timed_alone_wherever_shared_ones_run():
    """Those that overlap the exchange of tokens are run by what exchanges them."""
    dispatcher = SimpleNamespace(shared_experts="beside")
    mixture = SimpleNamespace(use_shared_expert=True, token_dispatcher=dispatcher)
    with pytest.raises(KeyError), without_shared_experts(mixture):
        assert not mixture.use_shared_expert and dispatcher.shared_experts is None
        raise KeyError
    assert mixture.use_shared_expert and dispatcher.shared_experts == "beside"

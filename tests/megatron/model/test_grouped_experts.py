"""Which kinds of Megatron's experts HDP knows."""

from unittest import mock

import pytest
import torch
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_hdp.megatron.model.moe import HdpMoeTransformerLayer


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
        expected = "knows SequentialMLP or TEGroupedMLP in .*, layer 3 has GroupedMLP in Transf"
        with pytest.raises(ValueError, match=expected):
            HdpMoeTransformerLayer.adopt(layer)
    assert type(layer) is TransformerLayer

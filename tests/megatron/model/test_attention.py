"""HDP's attention in the place of Megatron's: its sink stays the parameter that it was."""

import pytest
import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.model import building
from megatron_hdp.megatron.model.attention import HdpCoreAttention
from tests.support.gradients import tiny_arguments, write_corpus


def swapped(folder, softmax_type):
    """Body of a rank: names of the parameters before, whether they are the same ones after."""
    arguments = tiny_arguments(write_corpus(folder, [5]), softmax_type=softmax_type)
    parallel.initialise(arguments)
    kind = building.transformer_config(arguments), 1, AttnMaskType.causal, "self"
    stock, ours = DotProductAttention(*kind), HdpCoreAttention(*kind)
    ours.take_over(stock)
    before, after = dict(stock.named_parameters()), dict(ours.named_parameters())
    keys = [sorted(one.sharded_state_dict("", (), {"dp_cp_group": None})) for one in (stock, ours)]
    sink = ours.softmax_offset
    kept = before.keys() == after.keys() and all(before[name] is after[name] for name in before)
    return kept and keys[0] == keys[1], sorted(before), sink is None or torch.any(sink != 0).item()


@pytest.mark.parametrize(
    ("softmax_type", "names", "is_set"),
    [("vanilla", [], True), ("off-by-one", [], False), ("learnable", ["softmax_offset"], True)],
)
def test_the_sink_is_taken_over(run_ranks, tmp_path, softmax_type, names, is_set):
    found = run_ranks(1, swapped, tmp_path, softmax_type)
    assert found == [(True, names, is_set)]

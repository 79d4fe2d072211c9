"""HDP's attention in the place of Megatron's: its sink, and latents over other layers' kind."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.model import building, mla
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


def fused_projection(normalization, gamma_is_centred):
    """A projection that norms its input itself, as TransformerEngine's, and its gain."""
    generator = torch.Generator().manual_seed(0)
    gain, bias = (torch.randn(6, generator=generator, dtype=torch.float64) for _ in range(2))
    config = SimpleNamespace(
        normalization=normalization,
        layernorm_epsilon=1e-3,
        layernorm_zero_centered_gamma=gamma_is_centred,
    )
    return SimpleNamespace(layer_norm_weight=gain, layer_norm_bias=bias), config


@pytest.mark.parametrize("is_centred", [False, True])
def test_a_norm_inside_the_projection_is_applied_to_the_latent(is_centred):
    x = torch.randn(5, 6, dtype=torch.float64)
    projection, config = fused_projection("RMSNorm", is_centred)
    gain = projection.layer_norm_weight + is_centred
    right = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * gain
    torch.testing.assert_close(mla._normed(x, projection, config), right)

    projection, config = fused_projection("LayerNorm", is_centred)
    gain = projection.layer_norm_weight + is_centred
    spread = (x.var(-1, correction=0, keepdim=True) + 1e-3).sqrt()
    right = (x - x.mean(-1, keepdim=True)) / spread * gain + projection.layer_norm_bias
    torch.testing.assert_close(mla._normed(x, projection, config), right)


def test_a_latent_that_is_normed_already_stays():
    x = torch.randn(5, 6)
    assert mla._normed(x, torch.nn.Linear(6, 2), None) is x


def test_ddp_is_told_to_add_a_gradient_that_another_layer_may_have_added():
    weight = torch.nn.Parameter(torch.ones(2, 2))
    weight.grad_added_to_main_grad = True
    (mla._AddedByDdp.apply(weight) * 3).sum().backward()
    assert weight.grad_added_to_main_grad is False
    assert torch.equal(weight.grad, torch.full((2, 2), 3.0))


def test_parameters_that_are_gathered_before_a_forward_pass_are_waited_for():
    projection, seen = torch.nn.Linear(2, 2), []
    projection.register_forward_pre_hook(lambda module, _: seen.append(module))
    mla._gather_parameters(projection)
    assert seen == [projection]


@pytest.mark.parametrize("num_turned", [4, 8])
def test_the_rotation_is_megatrons(num_turned):
    """Of all channels, or of a part of them."""
    x = torch.randn(5, 1, 3, 8, dtype=torch.float64)
    angles = torch.randn(5, 1, 1, num_turned // 2, dtype=torch.float64)
    both = torch.cat((angles, angles), -1)
    right = _apply_rotary_pos_emb_bshd(x, both, False, True, 1.3)
    found = mla._turned(x, angles.cos() * 1.3, angles.sin() * 1.3)
    torch.testing.assert_close(found, right)

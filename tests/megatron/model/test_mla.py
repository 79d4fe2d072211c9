"""Latent attention over layers of TransformerEngine's kind, and its positions and rotation."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

from megatron_hdp.megatron.model import mla


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

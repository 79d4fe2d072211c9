"""Latent attention in a checkout: what Megatron built is adapted, what it cannot build refused."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as functional
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.lm import options
from megatron_hdp.megatron.lm.model import adapt
from megatron_hdp.megatron.model import HdpCoreAttention, HdpMlaSelfAttention, building
from megatron_hdp.options import OptionError
from megatron_hdp.planner.shape import RingWays
from tests.gradient_equivalence.case import Case
from tests.megatron.lm.test_options import on
from tests.support.gradients import errors_of, hdp_gradients, largest_error
from tests.support.mla import MLA, PlainCoreAttention, plain_stock_attention

# what HDP knows TransformerEngine's by
TEDotProductAttention = type("TEDotProductAttention", (PlainCoreAttention,), {})


def adapted_errors(cases):
    """Body of a rank: see `errors_of`; Megatron builds its own attention, which is then adapted."""
    first_draw = building.initialise_by_name

    def adapt_and_draw(model, seed):
        before = {name: id(one) for name, one in model.named_parameters()}
        keys = list(model.state_dict())
        assert all(type(one.self_attention) is MLASelfAttention for one in model.decoder.layers)
        adapt(model, fused_loss=False)
        for layer in model.decoder.layers:
            assert isinstance(layer.self_attention, HdpMlaSelfAttention)
            assert isinstance(layer.self_attention.core_attention, HdpCoreAttention)
        assert {name: id(one) for name, one in model.named_parameters()} == before
        assert list(model.state_dict()) == keys
        first_draw(model, seed)

    with (
        plain_stock_attention(),
        mock.patch.object(building, "attend_to_own_positions", lambda spec, has_experts: None),
        mock.patch.object(building, "HdpCoreAttention", TEDotProductAttention),
        mock.patch.object(building, "initialise_by_name", adapt_and_draw),
    ):
        return errors_of(cases)


@pytest.mark.slow
def test_an_adapted_model_is_exact_and_keeps_its_parameters(run_ranks, tmp_path):
    cases = Case(2, MLA | {"hdp_fused_loss": False}).runs(tmp_path)
    errors = run_ranks(2, adapted_errors, cases)[0]
    assert max(errors) <= 1e-10, errors


class NormedProjection(ColumnParallelLinear):
    """Norms its input itself, and adds its weight's gradient where DDP would: as TransformerEngine.

    It marks the weight for that, whatever another use of it said before.
    """

    @classmethod
    def like(cls, plain, norm):
        """One with the weights of Megatron's local layers."""
        layer = cls.__new__(cls)
        layer.__dict__.update(plain.__dict__)
        layer.layer_norm_weight, layer.eps = norm.weight, norm.eps
        return layer

    def forward(self, x):
        """See the class."""
        normed = functional.rms_norm(x, x.shape[-1:], self.layer_norm_weight, self.eps)
        return AddingToTheBuffer.apply(normed, self.weight), None


class AddingToTheBuffer(torch.autograd.Function):
    """A product whose weight gets its gradient in ``main_grad``."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        (x,), weight = ctx.saved_tensors, ctx.weight
        weight.main_grad += gradient.flatten(0, -2).t() @ x.flatten(0, -2)
        weight.grad_added_to_main_grad = True
        return gradient @ weight, torch.zeros_like(weight)


def steps_of_ways(arguments, plan):
    """Body of a rank: loss and gradients by what travels, with such a projection."""
    first_draw = building.initialise_by_name

    def put_norms_inside(model, seed):
        first_draw(model, seed)
        for layer in model.decoder.layers:
            attention = layer.self_attention
            attention.linear_kv_up_proj = NormedProjection.like(
                attention.linear_kv_up_proj, attention.kv_layernorm
            )
            attention.kv_layernorm = IdentityOp()

    def in_turn(self, lengths, ring):
        return sum(lengths) // 12 % 2 == 0

    parallel.initialise(arguments)
    with (
        mock.patch.object(building, "initialise_by_name", put_norms_inside),
        mock.patch.object(RingWays, "latent_is_faster", in_turn),
    ):
        return [
            hdp_gradients(replace(arguments, hdp_mla_ring=way), plan=plan)
            for way in ("kv", "auto", "latent")
        ]


@pytest.mark.slow
def test_a_projection_that_norms_and_adds_by_itself_gets_the_same(run_ranks, tmp_path):
    """Whatever travels, or both in turn; the plain layers' gradients are the standard."""
    _, (arguments, plan) = Case(2, MLA).runs(tmp_path)
    by_kv, in_turn, by_latent = run_ranks(2, steps_of_ways, arguments, plan)[0]
    assert largest_error(by_latent, by_kv) <= 1e-10
    assert largest_error(in_turn, by_kv) <= 1e-10
    plain, gradients = run_ranks(2, plain_step, arguments, plan)[0]
    renamed = {
        one.replace("kv_layernorm.weight", "linear_kv_up_proj.layer_norm_weight"): gradient
        for one, gradient in gradients.items()
    }
    assert largest_error(by_kv, (plain, renamed)) <= 1e-10


def plain_step(arguments, plan):
    """Body of a rank: the same with Megatron's local layers."""
    parallel.initialise(arguments)
    return hdp_gradients(arguments, plan=plan)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"transformer_impl": "local"}, "with --transformer-impl local: expected transformer_engi"),
        ({"recompute_modules": ["core_attn", "mla_up_proj"]}, "--recompute-modules mla_up_proj"),
        ({"cache_mla_latents": True}, "--cache-mla-latents .* it serves inference"),
        ({"mla_down_proj_fusion": True}, "--mla-down-proj-fusion "),
    ],
)
def test_what_cannot_run_is_refused(flags, message):
    latent = {"multi_latent_attention": True, "transformer_impl": "transformer_engine"}
    with pytest.raises(OptionError, match=message):
        options.check(on(**latent | flags))
    options.check(on(**latent))


def test_rotation_is_never_fused(monkeypatch):
    monkeypatch.setattr(options, "fused_kernel_is_there", lambda: True)
    for latent in (False, True):
        args = on(apply_rope_fusion=True, multi_latent_attention=latent)
        options.settle(args)
        assert args.apply_rope_fusion is not latent


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cache_mla_latents": True}, "cache_mla_latents"),
        ({"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}, "mla_up_pr"),
    ],
)
def test_what_a_model_was_built_for_is_refused_too(change, message):
    stock = object.__new__(MLASelfAttention)
    torch.nn.Module.__init__(stock)
    stock.config = mock.Mock(cache_mla_latents=change.get("cache_mla_latents", False))
    stock.recompute_up_proj = "recompute_modules" in change
    with pytest.raises(ValueError, match=message):
        HdpMlaSelfAttention.adopt(stock)

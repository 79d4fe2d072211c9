"""Latent attention in a checkout: what Megatron built is adapted, what it cannot build refused."""

from unittest import mock

import pytest
import torch
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from megatron_hdp.megatron.lm import options
from megatron_hdp.megatron.lm.model import adapt
from megatron_hdp.megatron.model import HdpCoreAttention, HdpMlaSelfAttention, building
from megatron_hdp.options import OptionError
from tests.megatron.lm.test_options import ON, parsed
from tests.megatron.step.test_mla_exactness import cases_of
from tests.support.gradients import errors_of
from tests.support.mla import PlainCoreAttention, plain_stock_attention

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
            assert type(layer.self_attention) is HdpMlaSelfAttention
            assert type(layer.self_attention.core_attention) is HdpCoreAttention
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


def test_an_adapted_model_is_exact_and_keeps_its_parameters(run_ranks, tmp_path):
    cases = cases_of(tmp_path, 2, num_plans=1, hdp_fused_loss=False)
    errors = run_ranks(2, adapted_errors, cases)[0]
    assert max(errors) <= 1e-10, errors


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
        options.check(parsed(*ON, **latent | flags))
    options.check(parsed(*ON, **latent))


def test_rotation_is_never_fused(monkeypatch):
    monkeypatch.setattr(options, "fused_kernel_is_there", lambda: True)
    for latent in (False, True):
        args = parsed(*ON, apply_rope_fusion=True, multi_latent_attention=latent)
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

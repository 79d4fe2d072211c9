"""HDP's attention in the place of Megatron's: its sink, and latents over other layers' kind."""

import ast
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from megatron.core import fp8_utils
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.model import building, lora, mla
from megatron_hdp.megatron.model.attention import HdpCoreAttention, HdpPackedSeqParams
from tests.support import te_wheel
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


KERNELS = {"attention_softmax_in_fp32", "bf16", "deterministic_mode", "masked_softmax_fusion"}
"""Kernels' own business: softmax is float32 or float64, torch and TransformerEngine are asked
whether they must be deterministic.
"""
USED = {
    *("init_method", "kv_channels", "num_attention_heads", "num_query_groups", "params_dtype"),
    *("perform_initialization", "softmax_type", "window_attn_skip_freq", "window_size"),
    *("sequence_parallel", "tensor_model_parallel_size"),
    "apply_query_key_layer_scaling",  # changes nothing
}
REFUSED = {"attention_dropout": 0.1, "context_parallel_size": 2} | dict.fromkeys(
    (
        *("fp16", "batch_invariant_mode", "qk_clip", "log_max_attention_logit", "fp4"),
        *("fp8_dot_product_attention", "fp8_multi_head_attention", "quant_recipe"),
    ),
    True,
)
BUILT_WITH = {
    *("config", "layer_number", "attn_mask_type", "attention_type", "softmax_scale"),
    *("k_channels", "v_channels", "cp_comm_type", "pg_collection"),
}
TRANSFORMER = Path(DotProductAttention.__init__.__code__.co_filename).parent
STOCK = {
    "DotProductAttention": TRANSFORMER / "dot_product_attention.py",
    "TEDotProductAttention": TRANSFORMER.parent / "extensions" / "transformer_engine.py",
}


def fields_read(source, name):
    """Fields of the configuration that a class reads."""
    (made,) = (x for x in ast.walk(ast.parse(source)) if getattr(x, "name", None) == name)
    return {
        one.attr
        for one in ast.walk(made)
        if isinstance(one, ast.Attribute)
        and "config" in (getattr(one.value, "id", None), getattr(one.value, "attr", None))
    }


@pytest.mark.parametrize("name", STOCK)
def test_every_field_that_stock_attention_reads_is_used_or_refused(name):
    found = fields_read(STOCK[name].read_text(), name)
    assert {"softmax_type", "window_size", "attention_dropout"} <= found
    assert found <= KERNELS | USED | REFUSED.keys(), "new: what does it do under HDP?"


def test_a_new_field_would_be_seen():
    source = "class A:\n    def f(self, config):\n        config.x; self.config.y; self.z"
    assert fields_read(source, "A") == {"x", "y"}


@pytest.mark.parametrize("module", ["attention", "multi_latent_attention"])
def test_every_argument_that_stock_attention_is_built_with_is_known(module):
    """And the scale among them."""
    tree = ast.parse((TRANSFORMER / f"{module}.py").read_text())
    calls = [x for x in ast.walk(tree) if isinstance(x, ast.Call)]
    given = [
        {one.arg for one in call.keywords}
        for call in calls
        if "submodules.core_attention" in ast.unparse(call) and len(call.keywords) > 2
    ]
    assert given and all("softmax_scale" in one and one <= BUILT_WITH for one in given), given


SMALL = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "attention_dropout": 0.0}


def built(config, mask=AttnMaskType.causal, **arguments):
    return HdpCoreAttention(
        config,
        2,
        mask,
        "self",
        pg_collection=SimpleNamespace(tp=SimpleNamespace(size=lambda: 1)),
        **arguments,
    )


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_use_is_refused_by_name(name):
    config = TransformerConfig(**SMALL)
    assert built(config).scale == 0.5
    setattr(config, name, REFUSED[name])
    with pytest.raises(ValueError, match=f"{name}|{name.replace('_', ' ')}"):
        built(config)


def test_a_scale_is_used_and_a_mask_that_is_not_causal_refused():
    config = TransformerConfig(**SMALL)
    assert built(config, softmax_scale=0.3).scale == 0.3
    built(config, AttnMaskType.padding_causal)
    with pytest.raises(ValueError, match="no_mask; use a causal one"):
        built(config, AttnMaskType.no_mask)


@pytest.mark.parametrize("name", ["autocast", "fp8_autocast"])
def test_attention_is_left_out_of_fp8(monkeypatch, name):
    """By either name that TransformerEngine has had for it."""
    is_on = [True]

    @contextmanager
    def autocast(enabled=True):
        is_on.append(enabled)
        yield
        is_on.pop()

    library = SimpleNamespace(**{name: autocast})
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", library)
    monkeypatch.setattr(fp8_utils, "HAVE_TE", True)
    assert seen_by_attention(lambda: is_on[-1]) == [True, False] and is_on == [True]


def seen_by_attention(look):
    """What is seen within attention, of a configuration without FP8 and of one with it."""
    config, seen, q = TransformerConfig(**SMALL), [], torch.ones(3, 1, 4, 4)
    params = mock.create_autospec(HdpPackedSeqParams, instance=True, attention=None)
    params.layout = params.comm = None
    params.attention = lambda q, *_, **how: seen.append(look()) or q
    for config.fp8 in (None, "hybrid"):
        found = built(config)(q, q, q, None, packed_seq_params=params)
        assert found.shape == (3, 1, 16)
    return seen


def in_fp8_of_the_library(library):
    """Body of a rank: whether FP8 is on in attention and after it, as it was."""
    te_wheel.load(library)
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager as State

    is_there = mock.patch.object(fp8_utils, "HAVE_TE", True)
    with is_there, te.autocast(enabled=True, recipe=Float8CurrentScaling()):
        seen = seen_by_attention(State.is_fp8_enabled)
        return [*seen, State.is_fp8_enabled(), State.get_fp8_recipe().float8_current_scaling()]


@pytest.mark.slow
def test_transformer_engines_own_fp8_is_off_in_attention_alone(run_ranks, tmp_path):
    found = run_ranks(1, in_fp8_of_the_library, te_wheel.unpack(tmp_path))
    assert found == [[True, False, True, True]]


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
    torch.testing.assert_close(lora.normed(x, projection, config), right)

    projection, config = fused_projection("LayerNorm", is_centred)
    gain = projection.layer_norm_weight + is_centred
    spread = (x.var(-1, correction=0, keepdim=True) + 1e-3).sqrt()
    right = (x - x.mean(-1, keepdim=True)) / spread * gain + projection.layer_norm_bias
    torch.testing.assert_close(lora.normed(x, projection, config), right)


def test_a_latent_that_is_normed_already_stays():
    x = torch.randn(5, 6)
    assert lora.normed(x, torch.nn.Linear(6, 2), None) is x


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

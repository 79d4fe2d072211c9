"""Rotary angles at given positions are those that Megatron's own embedding has there."""

from dataclasses import replace

import pytest
import torch
from megatron.core.models.common.embeddings import YarnRotaryEmbedding, rope_utils
from megatron.core.models.common.embeddings.rotary_pos_embedding import (
    MultimodalRotaryEmbedding,
    RotaryEmbedding,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_hdp.megatron.cpu import shim
from megatron_hdp.megatron.model import building
from megatron_hdp.megatron.model.rotary import (
    OwnPositionRotaryEmbedding,
    at_own_positions,
    fused_kernel_is_there,
)
from megatron_hdp.megatron.parallel import compute_device
from tests.support.gradients import tiny_arguments, write_corpus

LENGTH = 50
SETTINGS = [
    {},
    {"rotary_percent": 0.5},
    {"rotary_interleaved": True},
    {"seq_len_interpolation_factor": 4.0},
    {"rotary_base": 500_000, "rope_scaling": True},
]


@pytest.fixture(autouse=True)
def megatron_runs_here():
    if shim.needed():
        with shim.applied():
            yield
    else:
        yield


def stock_embedding(**settings):
    settings = {"kv_channels": 16, "rotary_percent": 1.0} | settings
    return RotaryEmbedding(**settings, use_cpu_initialization=True)


@pytest.mark.parametrize("settings", SETTINGS)
def test_angles_are_the_rows_of_megatrons_table(settings):
    stock = stock_embedding(**settings)
    table = stock.get_emb(LENGTH)
    positions = torch.tensor([0, 1, 2, 0, 17, 18, 49, 3, 0], device=compute_device())
    found = OwnPositionRotaryEmbedding.like(stock)(positions)
    assert torch.equal(found, table[positions])
    assert not torch.equal(found, table[: len(positions)])  # the positions matter


YARNS = [
    {"scaling_factor": 4.0},
    {"scaling_factor": 32.0, "correction_range_round_to_int": False, "rotary_base": 150_000},
    {"scaling_factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.0, "beta_fast": 8.0},
]


@pytest.mark.parametrize("settings", YARNS)
def test_yarns_angles_and_factor_are_those_of_megatrons_table(settings):
    stock = YarnRotaryEmbedding(kv_channels=64, use_cpu_initialization=True, **settings)
    table, factor = stock.get_emb(9000)
    positions = torch.tensor([0, 1, 2, 0, 17, 8999, 49, 3, 0], device=compute_device())
    own = at_own_positions(stock)
    found, found_factor = own(positions)
    assert torch.equal(found, table[positions]) and found_factor == factor != 1
    assert not dict(own.named_buffers()) and dict(stock.named_buffers())


ROPES = {
    "llama3": (
        {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        RotaryEmbedding,
        {"rotary_percent": 1.0, "rope_scaling": True, "rope_scaling_factor": 32.0},
    ),
    "yarn": (
        {"rope_type": "yarn", "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0},
        YarnRotaryEmbedding,
        {"scaling_factor": 16.0},
    ),
    "yarn-unrounded": (
        {"rope_type": "yarn", "factor": 32.0, "truncate": False},
        YarnRotaryEmbedding,
        {"scaling_factor": 32.0, "correction_range_round_to_int": False},
    ),
    "yarn-mscale": (
        {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.0},
        YarnRotaryEmbedding,
        {"scaling_factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.0},
    ),
}


@pytest.mark.parametrize("name", ROPES)
def test_angles_are_those_of_transformers(name):
    transformers = pytest.importorskip("transformers", minversion="5.0")
    theirs, kind, settings = ROPES[name]
    length = {"original_max_position_embeddings": 8192}
    config = transformers.LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters=theirs | length | {"rope_theta": 500_000.0},
    )
    rotation = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    positions = torch.tensor([0, 1, 5, 8191, 40_000, 131_071], device=compute_device())
    cos, sin = rotation(torch.zeros(1, 1), positions[None])
    settings = settings | (length if kind is YarnRotaryEmbedding else {})
    stock = kind(kv_channels=64, rotary_base=500_000, use_cpu_initialization=True, **settings)
    found, factor = at_own_positions(stock)(positions), 1.0
    if kind is YarnRotaryEmbedding:
        found, factor = found
    # a frequency's last bit is a hundredth of a turn after 131,071 positions
    near = {"rtol": 1e-4, "atol": 2e-2}
    torch.testing.assert_close(found[:, 0, 0].cos() * factor, cos[0], **near)
    torch.testing.assert_close(found[:, 0, 0].sin() * factor, sin[0], **near)
    torch.testing.assert_close(found[1, 0, 0, :32], rotation.inv_freq, rtol=1e-6, atol=0)
    assert factor == pytest.approx(rotation.attention_scaling, rel=1e-6)


def test_the_stock_embedding_is_left_as_it_was():
    stock = stock_embedding()
    before = dict(vars(stock))
    own = OwnPositionRotaryEmbedding.like(stock)
    own(torch.arange(3, device=compute_device()))
    assert vars(stock) == before and type(stock) is RotaryEmbedding


def test_another_kind_of_embedding_is_refused():
    stock = MultimodalRotaryEmbedding(kv_channels=16, rotary_percent=1.0)
    with pytest.raises(ValueError, match="the model has MultimodalRotaryEmbedding"):
        at_own_positions(stock)


@pytest.mark.parametrize("params", [None, PackedSeqParams(qkv_format="thd")])
def test_a_micro_batch_that_hdp_did_not_make_is_refused(params):
    own = OwnPositionRotaryEmbedding.like(stock_embedding())
    with pytest.raises(TypeError, match="run through HdpExecutor"):
        own.get_rotary_seq_len(None, None, None, None, params)


def fused_apply_rotary_pos_emb(t, freqs, transpose_output_memory=False, interleaved=False):
    """What TransformerEngine's kernel does to ``[s, b, heads, d]``, on a CPU."""
    assert freqs.dim() == 4 and freqs.shape[1:3] == (1, 1) and freqs.dtype == torch.float32
    assert len(t) <= len(freqs)
    out, width = t.float().clone(), freqs.shape[-1]
    for s in range(len(t)):
        for i in range(width):
            if interleaved:
                other, sign = i ^ 1, -1 if i % 2 == 0 else 1
            else:
                other, sign = (i + width // 2) % width, -1 if i < width // 2 else 1
            sine, cosine = freqs[s, 0, 0, i].sin(), freqs[s, 0, 0, i].cos()
            out[s, :, :, i] = t[s, :, :, i] * cosine + sign * t[s, :, :, other] * sine
    return out.to(t.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "settings", [{}, {"rotary_percent": 0.5}, {"rotary_interleaved": True}], ids=str
)
def test_the_fused_kernel_turns_packed_tokens_by_their_own_positions(monkeypatch, settings, dtype):
    monkeypatch.setattr(
        rope_utils, "fused_apply_rotary_pos_emb", fused_apply_rotary_pos_emb, raising=False
    )
    stock = stock_embedding(**settings)
    positions = torch.tensor([0, 1, 2, 0, 17, 18, 49, 3, 0])  # of several sequences, and slices
    query = torch.randn(9, 1, 3, 16, generator=torch.Generator().manual_seed(1)).to(dtype)

    def turn(freqs, fused):
        config = TransformerConfig(
            num_layers=1,
            hidden_size=48,
            num_attention_heads=3,
            use_cpu_initialization=True,
            apply_rope_fusion=fused,
        )
        config.rotary_interleaved = settings.get("rotary_interleaved", False)
        return rope_utils.apply_rotary_pos_emb(query, freqs, config, cp_group=object())

    freqs = OwnPositionRotaryEmbedding.like(stock)(positions)
    expected, found = turn(freqs, False), turn(freqs, True)
    rounding = {"rtol": 0.02, "atol": 0.02} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(found, expected, **rounding)
    stock_rows = stock.get_emb(len(positions))  # planted: positions 0, 1, 2, ...
    assert (turn(stock_rows, True) - expected).abs().max() > 0.1


@pytest.mark.parametrize("there", [False, True])
def test_the_kernel_is_used_where_it_is_and_can_count(monkeypatch, tmp_path, there):
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", print, raising=False)
    monkeypatch.setattr(building, "fused_kernel_is_there", lambda: there)
    said = []
    monkeypatch.setattr(building, "say", said.append)
    prefix = write_corpus(tmp_path, [64])
    exact = tiny_arguments(prefix)
    bf16 = tiny_arguments(prefix, fp64=False, bf16=True)
    heads = bf16.num_attention_heads + 2 * bf16.num_query_groups
    most = (2**31 - 1) // (heads * bf16.kv_channels)
    for arguments, fused in (
        (exact, False),
        (bf16, there),
        (replace(bf16, hdp_tokens_per_rank=most), there),
        (replace(bf16, hdp_tokens_per_rank=most + 1), False),
        (replace(bf16, hdp_tokens_per_rank=most, hdp_offload="auto", num_layers=8), False),
        (replace(bf16, position_embedding_type="learned_absolute"), False),
    ):
        assert building._fuses_rotation(arguments) == fused
    assert len(said) == 2 * there and all("cannot count" in line for line in said)
    assert building.transformer_config(bf16).apply_rope_fusion == there


def test_a_cpu_has_no_such_kernel(monkeypatch):
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", print, raising=False)
    assert fused_kernel_is_there() == (not shim.needed())

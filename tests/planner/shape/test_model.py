"""A shape's parameters are those one counts by hand, and those published."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_hdp.planner import LLAMA_7B, CostModel
from megatron_hdp.planner.memory import Job, stage_memory
from megatron_hdp.planner.shape import Attention, Layer, Mlp, ModelShape, Weights, ring_ways

SMALL = {
    "num_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_query_groups": 1,
    "kv_channels": 3,
    "ffn_hidden_size": 10,
}


def shape(**changes: object) -> ModelShape:
    return ModelShape.uniform(**SMALL, **changes)  # type: ignore[arg-type]


def test_parameters_counted_by_hand():
    # a layer: Q and output 8 x 12 each, K and V 8 x 3 each, two matrices of 8 x 10
    plain = 2 * (2 * 96 + 2 * 24 + 2 * 80)
    assert shape(gated=False).active_parameters == plain
    assert shape(gated=True).active_parameters == plain + 2 * 80
    assert shape(gated=False, vocab_size=100).active_parameters == plain + 800
    experts = shape(gated=False, num_experts=5, experts_per_token=2)
    assert experts.active_parameters == plain + 2 * (2 * 80 + 8 * 5)
    assert experts.expert_parameters == 2 * 2 * 2 * 80
    assert experts.sent_to_experts == 2 * 2 * 8
    gated = shape(gated=True, num_experts=5, experts_per_token=2)
    assert gated.expert_parameters == 2 * 2 * 3 * 80


@pytest.mark.parametrize(
    ("sizes", "billions"),
    [
        # LLaMA-7B of 2023: multi-head attention
        ({"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_query_groups": 32,
          "kv_channels": 128, "ffn_hidden_size": 11008, "gated": True, "vocab_size": 32000}, 6.6),
        # Mixtral 8x7B: two of eight experts
        ({"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_query_groups": 8,
          "kv_channels": 128, "ffn_hidden_size": 14336, "gated": True, "vocab_size": 32000,
          "num_experts": 8, "experts_per_token": 2}, 12.7),
    ],
)  # fmt: skip
def test_parameters_of_public_models(sizes, billions):
    assert ModelShape.uniform(**sizes).active_parameters / 1e9 == pytest.approx(billions, abs=0.1)


def test_what_is_stored_counted_by_hand():
    """Norms, biases, embedding and output layer, and who holds which."""
    attention = Attention(
        num_heads=4,
        num_groups=1,
        qk_channels=3,
        v_channels=5,
        qkv_bias=True,
        output_bias=True,
        qk_norm=True,
        norm_bias=True,
    )
    # Q 8 x 12, K 8 x 3, V 8 x 5, output 20 x 8; biases 12 + 3 + 5
    split = 96 + 24 + 40 + 160 + 20
    assert attention.weights(8) == Weights(split=split, whole=8 + 2 * 2 * 3)
    assert (attention.travelling_size, attention.width) == (8, (12 + 20) / 2)
    plain = Mlp(ffn_hidden_size=10, gated=True, bias=True)
    assert plain.weights(8) == Weights(split=3 * 80 + 20, whole=8)
    experts = Mlp(ffn_hidden_size=10, gated=False, num_experts=6, experts_per_token=2)
    assert experts.weights(8) == Weights(whole=48, experts=6 * 2 * 80)
    layers = tuple(Layer(hidden_size=8, attention=attention, mlp=mlp) for mlp in (plain, experts))
    model = ModelShape(layers=layers, hidden_size=8, vocab_size=100)
    both = 2 * (split + 8 + 12 + 2 * 8)
    assert model.parameters == both + 3 * 80 + 20 + 8 + 48 + 6 * 160 + 8 + 2 * 800
    tied = ModelShape(layers=layers, hidden_size=8, vocab_size=100, tied_embeddings=True)
    assert model.parameters - tied.parameters == 800
    assert model.sent_to_experts == 2 * 8


DEEPSEEK_V3 = Attention(
    num_heads=128,
    num_groups=128,
    qk_channels=192,
    v_channels=128,
    rotary_channels=64,
    qk_norm=True,
    kv_rank=512,
    q_rank=1536,
    shared_channels=64,
)


def test_a_latent_travels_in_place_of_much_more():
    assert (DEEPSEEK_V3.travelling_size, DEEPSEEK_V3.latent_size) == (40_960, 576)
    plain = Attention(num_heads=4, num_groups=4, qk_channels=8, v_channels=8)
    assert (plain.travelling_size, plain.latent_size, plain.latent_matrices) == (64, 0, 0)


def test_parameters_of_latent_attention_counted_by_hand():
    h, queries, made = 7168, 128 * 192, 128 * (128 + 128)
    expected = h * 1536 + 1536 * queries + h * 576 + 512 * made + 128 * 128 * h
    assert DEEPSEEK_V3.matrices(h) == expected
    assert DEEPSEEK_V3.latent_matrices == 512 * made
    assert DEEPSEEK_V3.weights(h) == Weights(split=expected, whole=512 + 1536)
    at_once = replace(DEEPSEEK_V3, q_rank=0)
    assert at_once.matrices(h) == expected + h * queries - 1536 * (h + queries)
    assert at_once.weights(h).whole == 512


def test_the_two_ways_of_its_rings():
    mlp = Mlp(ffn_hidden_size=2048, gated=True)
    layer = Layer(hidden_size=7168, attention=DEEPSEEK_V3, mlp=mlp)
    model = ModelShape(layers=(layer,) * 2, hidden_size=7168, vocab_size=0)
    ways = ring_ways(model, LLAMA_7B, value_bytes=2, tensor_ranks=8)
    assert ways.kv == replace(LLAMA_7B, kv_bytes_per_token=2 * 40_960 * 2)
    assert ways.latent.kv_bytes_per_token == 2 * 576 * 2 * 8
    share = DEEPSEEK_V3.latent_matrices / layer.dense_matrices
    assert ways.latent.merge_b == pytest.approx(4 * LLAMA_7B.b * share / 3)
    assert ways.latent.made_bytes_per_token == 2 * 128 * (128 + 128) * 2
    alone = ring_ways(model, LLAMA_7B, value_bytes=2, tensor_ranks=8, some_made=False)
    assert alone.latent == replace(ways.latent, made_bytes_per_token=0.0)


def with_windows(model: ModelShape, window: int, every: int, **changes: object) -> ModelShape:
    """The model with a window in all layers but every so-manieth."""
    layers = [
        replace(layer, attention=replace(layer.attention, window=window, **changes))
        if number % every
        else layer
        for number, layer in enumerate(model.layers, 1)
    ]
    return replace(model, layers=tuple(layers))


def test_windows_counted_by_hand():
    plain = shape(gated=True)
    half = with_windows(plain, 5, 2, has_sink=True)
    assert half.parameters - plain.parameters == 4  # a sink for each head
    assert (half.window, half.window_share, plain.window) == (5, 0.5, None)
    # K and V of 3 channels: around the ring in one layer, 2 x 4 tokens of them in the other
    assert half.ring_costs(2) == {
        "kv_bytes_per_token": 2 * 6,
        "halo_bytes": 3 * 2 * 8 * 6,
        "window_tokens": 5,
        "window_share": 0.5,
        # of 12 channels and 4 heads; 2 x 12 + 12 in two bytes, 12 + 12 + 3 x 4 in four
        "query_ratio": (36 * 2 + 36 * 4) / (6 * (2 * 2 + 4)),
    }
    # 12 channels a layer; 9 tokens: 81, and 2 (5 x 9 - 25 / 2) = 65 in the window
    lengths = np.array([9, 4])
    attention = half.flops(lengths) - 6 * 13 * half.active_parameters
    assert attention == 6 * 12 * (81 + 16 + 65 + 16)
    costs = CostModel.from_model_shape(
        num_layers=2, hidden_size=12, num_parameters=1, flops_per_s=1.0, **half.ring_costs(2)
    )
    assert costs.a * costs.seen(lengths.astype(float)).sum() == attention


def test_a_halo_counts_where_it_is_more_than_a_ring():
    def ring_buffers(window: int) -> float:
        model = with_windows(shape(gated=True), window, 3)  # both layers
        return stage_memory(Job(shape=model, num_gpus=2, tokens_per_rank=100), 0).ring_buffers

    ring = 2 * 6 * (2 + 4) * 100
    assert ring_buffers(2) == ring
    assert ring_buffers(1001) == ring / 2 + 2 * 1000 * 6 * 2 * (2 + 4)


def test_shared_experts_and_routers_counted_by_hand():
    """Shared experts are cut like an MLP, their gate and the router's bias are on every rank."""
    experts = {"ffn_hidden_size": 10, "gated": True, "num_experts": 6, "experts_per_token": 2}
    shared = Mlp(**experts, shared_ffn_hidden_size=7, shared_gate=True)
    assert shared.weights(8) == Weights(split=3 * 8 * 7, whole=8 * 6 + 8, experts=6 * 3 * 80)
    assert shared.dense_matrices(8) == 3 * 8 * 7 + 8 * 6 + 8
    assert shared.expert_matrices(8) == 2 * 3 * 80
    biased = Mlp(**experts, bias=True)
    assert biased.weights(8) == Weights(whole=8 * 6 + 6, experts=6 * (3 * 80 + 2 * 10 + 8))

"""A shape's parameters are those one counts by hand, and those published."""

import pytest

from megatron_hdp.planner.shape import Attention, Layer, Mlp, ModelShape, Weights

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

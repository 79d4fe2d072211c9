"""Named models are the paper's, and a shape's parameters are those one counts by hand."""

import pytest

from megatron_hdp.planner import LLAMA_7B
from megatron_hdp.planner.models import (
    MODELS,
    active_parameters,
    cost_model_of,
    expert_parameters,
    model_of,
)


def test_llama_7b_is_the_cost_model_of_record():
    assert model_of("llama-7b").kv_bytes_per_token == 131_072
    assert cost_model_of("llama-7b") == LLAMA_7B


@pytest.mark.parametrize(
    ("name", "layers", "heads", "groups", "width", "parameters"),
    [
        ("llama-7b", 32, 32, 8, 4096, 7e9),
        ("llama-13b", 40, 40, 8, 5120, 13e9),
        ("llama-30b", 60, 56, 8, 7168, 30e9),  # over a hidden size of 6,656
        ("llama-70b", 80, 64, 8, 8192, 70e9),
        ("mistral-8x7b", 32, 32, 8, 4096, 13e9),
        ("mistral-8x22b", 56, 48, 8, 6144, 39e9),
    ],
)
def test_the_papers_table(name, layers, heads, groups, width, parameters):
    model = MODELS[name]
    assert (model.num_layers, model.num_attention_heads, model.num_query_groups) == (
        layers,
        heads,
        groups,
    )
    assert model.num_attention_heads * model.kv_channels == width
    assert model.kv_bytes_per_token == 2 * layers * groups * 128 * 2
    cost = cost_model_of(name)
    assert cost.a == pytest.approx(6 * layers * width / 400e12)
    assert cost.linear_s_per_token == pytest.approx(6 * parameters / 400e12)
    assert cost.num_layers == layers
    assert cost.activation_bytes_per_token == 34 * layers * width


@pytest.mark.parametrize(
    ("name", "experts"),
    [
        ("llama-7b", 0),
        ("mistral-8x7b", 32 * 3 * 4096 * 14336 * 2),
        ("mistral-8x22b", 56 * 3 * 6144 * 16384 * 2),
    ],
)
def test_experts_are_apart(name, experts):
    cost = cost_model_of(name)
    assert cost.b_experts == pytest.approx(6 * experts / 400e12)
    assert cost.b == pytest.approx(6 * (MODELS[name].active_parameters - experts) / 400e12)


def test_there_are_no_others():
    assert len(MODELS) == 6


def test_an_unknown_name_gives_the_nearest():
    with pytest.raises(ValueError, match=r"'lama-7b'; expected one of .*nearest: llama-7b"):
        model_of("lama-7b")


SMALL = {
    "num_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_query_groups": 1,
    "kv_channels": 3,
    "ffn_hidden_size": 10,
}


def test_parameters_counted_by_hand():
    # a layer: Q and output 8 x 12 each, K and V 8 x 3 each, two matrices of 8 x 10
    plain = 2 * (2 * 96 + 2 * 24 + 2 * 80)
    assert active_parameters(**SMALL, gated=False) == plain
    assert active_parameters(**SMALL, gated=True) == plain + 2 * 80
    assert active_parameters(**SMALL, gated=False, vocab_size=100) == plain + 800
    experts = active_parameters(**SMALL, gated=False, num_experts=5, experts_per_token=2)
    assert experts == plain + 2 * (2 * 80 + 8 * 5)
    mlp = {"num_layers": 2, "hidden_size": 8, "ffn_hidden_size": 10, "experts_per_token": 2}
    assert expert_parameters(**mlp, gated=False) == 2 * 2 * 2 * 80
    assert expert_parameters(**mlp, gated=True) == 2 * 2 * 3 * 80


@pytest.mark.parametrize(
    ("shape", "billions"),
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
def test_parameters_of_public_models(shape, billions):
    assert active_parameters(**shape) / 1e9 == pytest.approx(billions, abs=0.1)

"""Named models are the paper's."""

import pytest

from megatron_hdp.planner import LLAMA_7B
from megatron_hdp.planner.shape import MODELS, model_of


def test_llama_7b_is_the_cost_model_of_record():
    assert model_of("llama-7b").cost_model() == LLAMA_7B
    assert (LLAMA_7B.g, LLAMA_7B.kv_bytes_per_token, LLAMA_7B.ranks_per_node) == (0, 131_072, 8)
    assert (LLAMA_7B.intra_node_bytes_per_s, LLAMA_7B.inter_node_bytes_per_s) == (300e9, 50e9)


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
    assert (model.shape.num_layers, model.shape.attention_width) == (layers, layers * width)
    assert heads * 128 == width
    assert model.kv_bytes_per_token == 2 * layers * groups * 128 * 2
    cost = model_of(name).cost_model()
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
    cost = model_of(name).cost_model()
    assert cost.b_experts == pytest.approx(6 * experts / 400e12)
    assert cost.b == pytest.approx(6 * (MODELS[name].active_parameters - experts) / 400e12)


def test_there_are_no_others():
    assert len(MODELS) == 6


def test_an_unknown_name_gives_the_nearest():
    with pytest.raises(ValueError, match=r"'lama-7b'; expected one of .*nearest: llama-7b"):
        model_of("lama-7b")

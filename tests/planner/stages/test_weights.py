"""Relative time of stages, by hand."""

import pytest

from megatron_hdp.planner.shape import ModelShape
from megatron_hdp.planner.stages import LayerCosts, StageSplit, stage_weights

# LLaMA 70B: 64 heads of 128 in 8 groups, a gated MLP of 28,672
LLAMA_70B = {
    "num_layers": 79,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_query_groups": 8,
    "kv_channels": 128,
    "ffn_hidden_size": 28_672,
    "gated": True,
    "vocab_size": 128_256,
}
ATTENTION = 2 * 8192 * 8192 + 2 * 8192 * 1024  # parameters: Q and out, K and V
MLP = 3 * 8192 * 28_672
OUTPUT = 8192 * 128_256


def test_a_layer_and_the_output_layer_of_llama_70b() -> None:
    costs = LayerCosts.of_shape(ModelShape.uniform(**LLAMA_70B), 8192)
    assert costs.layers == (6 * (ATTENTION + MLP) + 6 * 8192 * 8192,) * 79
    assert costs.output == 6 * OUTPUT
    assert costs.output / costs.layers[0] == pytest.approx(1.1387, abs=1e-4)  # layers


def test_recomputation_runs_a_forward_again() -> None:
    linear, attention = 6 * (ATTENTION + MLP), 6 * 8192 * 8192
    full = LayerCosts.of_shape(ModelShape.uniform(**LLAMA_70B), 8192, recompute="full")
    selective = LayerCosts.of_shape(ModelShape.uniform(**LLAMA_70B), 8192, recompute="selective")
    assert full.layers[0] == pytest.approx(4 / 3 * (linear + attention))
    assert selective.layers[0] == pytest.approx(linear + 4 / 3 * attention)
    assert full.output == selective.output == 6 * OUTPUT


def test_of_a_mixture_a_token_meets_few_experts() -> None:
    experts = {"ffn_hidden_size": 1024, "num_experts": 16, "experts_per_token": 2}
    costs = LayerCosts.of_shape(ModelShape.uniform(**LLAMA_70B | experts), 1)
    parameters = 2 * 3 * 8192 * 1024 + 16 * 8192  # and the router
    assert costs.layers == (6 * (ATTENTION + parameters) + 6 * 8192,) * 79


def test_weights_count_layers_and_the_output_layer() -> None:
    costs = LayerCosts((2.0,) * 5, output=3.0)
    split = StageSplit.of(5, 2, layout="E|t*2|t*3|L")
    assert stage_weights(split, costs) == pytest.approx((0, 4 / 13, 6 / 13, 3 / 13))


def test_a_last_stage_of_fewer_layers_evens_out_llama_70b() -> None:
    costs = LayerCosts.of_shape(ModelShape.uniform(**LLAMA_70B), 8192)
    weights = stage_weights(StageSplit.of(79, 4, loss=True), costs)
    assert weights is not None
    assert sum(weights) == pytest.approx(1)
    assert weights[:3] == (weights[0],) * 3
    assert weights[3] / weights[0] == pytest.approx((19 + 1.1387) / 20, abs=1e-4)


def test_even_stages_are_planned_as_before() -> None:
    assert stage_weights(StageSplit.of(80, 4), LayerCosts((1.0, 1.0), 1.0)) is None
    assert stage_weights(StageSplit.of(4, 2, layout="Ett|ttL"), LayerCosts((1.0, 1.0), 1.0)) is None


def test_layers_that_differ_make_even_stages_unequal() -> None:
    costs = LayerCosts((1.0, 2.0, 3.0, 4.0), output=2.0)
    assert stage_weights(StageSplit.of(4, 2), costs) == pytest.approx((3 / 12, 9 / 12))

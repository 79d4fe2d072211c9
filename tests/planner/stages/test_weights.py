"""Relative time of stages, by hand."""

import pytest

from megatron_hdp.planner.stages import LayerCosts, StageSplit, stage_weights

# LLaMA 70B: 64 heads of 128 in 8 groups, a gated MLP of 28,672
LLAMA_70B = {
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
    costs = LayerCosts.of_shape(tokens=8192, **LLAMA_70B)
    assert costs.layer == 6 * (ATTENTION + MLP) + 6 * 8192 * 8192
    assert costs.output == 6 * OUTPUT
    assert costs.output / costs.layer == pytest.approx(1.1387, abs=1e-4)  # layers


def test_recomputation_runs_a_forward_again() -> None:
    linear, attention = 6 * (ATTENTION + MLP), 6 * 8192 * 8192
    full = LayerCosts.of_shape(tokens=8192, recompute="full", **LLAMA_70B)
    selective = LayerCosts.of_shape(tokens=8192, recompute="selective", **LLAMA_70B)
    assert full.layer == pytest.approx(4 / 3 * (linear + attention))
    assert selective.layer == pytest.approx(linear + 4 / 3 * attention)
    assert full.output == selective.output == 6 * OUTPUT


def test_of_a_mixture_a_token_meets_few_experts() -> None:
    shape = LLAMA_70B | {"ffn_hidden_size": 1024}
    costs = LayerCosts.of_shape(tokens=1, num_experts=16, experts_per_token=2, **shape)
    experts = 2 * 3 * 8192 * 1024 + 16 * 8192  # and the router
    assert costs.layer == 6 * (ATTENTION + experts) + 6 * 8192


def test_weights_count_layers_and_the_output_layer() -> None:
    costs = LayerCosts(layer=2.0, output=3.0)
    split = StageSplit.of(5, 2, layout="E|t*2|t*3|L")
    assert stage_weights(split, costs) == pytest.approx((0, 4 / 13, 6 / 13, 3 / 13))


def test_a_last_stage_of_fewer_layers_evens_out_llama_70b() -> None:
    costs = LayerCosts.of_shape(tokens=8192, **LLAMA_70B)
    weights = stage_weights(StageSplit.of(79, 4, loss=True), costs)
    assert weights is not None
    assert sum(weights) == pytest.approx(1)
    assert weights[:3] == (weights[0],) * 3
    assert weights[3] / weights[0] == pytest.approx((19 + 1.1387) / 20, abs=1e-4)


def test_even_stages_are_planned_as_before() -> None:
    assert stage_weights(StageSplit.of(80, 4), LayerCosts(1.0, 1.0)) is None
    assert stage_weights(StageSplit.of(4, 2, layout="Ett|ttL"), LayerCosts(1.0, 1.0)) is None

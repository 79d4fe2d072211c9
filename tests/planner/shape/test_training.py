"""Frozen weights and adapters counted by hand: parameters, FLOP, costs, rings, stages, memory."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_hdp.planner import LLAMA_7B
from megatron_hdp.planner.memory import Job, stage_memory
from megatron_hdp.planner.shape import Adapters, ModelShape, cost_model_of_shape, ring_ways
from megatron_hdp.planner.stages import LayerCosts
from tests.planner.shape.test_model import DEEPSEEK_V3

SHAPE = ModelShape.uniform(
    num_layers=2,
    hidden_size=8,
    num_attention_heads=4,
    num_query_groups=1,
    kv_channels=3,
    ffn_hidden_size=10,
    gated=True,
    vocab_size=100,
)
QKV, PROJ, MLP, OUTPUT = 8 * (12 + 3 + 3), 12 * 8, 3 * 80, 800
LINEAR = 2 * (QKV + PROJ + MLP)
EXPERTS = ModelShape.uniform(
    **{"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "num_query_groups": 2},
    **{"kv_channels": 4, "ffn_hidden_size": 10, "gated": True},
    **{"num_experts": 6, "experts_per_token": 2},
)


def test_adapters_of_every_linear_layer():
    tuned = SHAPE.training(
        (), Adapters(2, ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"))
    )
    each = 2 * ((8 + 18) + (12 + 8) + (8 + 20) + (10 + 8))
    assert tuned.trained_parameters == 2 * each
    assert tuned.parameters == SHAPE.parameters + 2 * each
    assert tuned.active_parameters == SHAPE.active_parameters + 2 * each
    # 4 FLOP of what is frozen, 6 of an adapter; of 6 each
    assert 6 * tuned.worked_parameters == pytest.approx(4 * (LINEAR + OUTPUT) + 6 * 2 * each)
    tokens = np.array([5])
    difference = 2 * (LINEAR + OUTPUT) * 5 - 6 * 2 * each * 5
    assert SHAPE.flops(tokens) - tuned.flops(tokens) == pytest.approx(difference)
    assert tuned.linear_share == pytest.approx(tuned.worked_parameters / SHAPE.active_parameters)


def test_frozen_layers_by_their_names():
    some = SHAPE.training(("decoder.layers.1.*", "*.linear_fc1.*", "output_layer.*"))
    frozen = QKV + PROJ + MLP + 160 + OUTPUT
    assert SHAPE.parameters - some.trained_parameters == frozen + 2 * 8  # and two norms
    assert some.active_parameters - some.worked_parameters == pytest.approx(frozen / 3)
    assert some.parameters == SHAPE.parameters
    assert SHAPE.training(()) == SHAPE
    assert SHAPE.training(("nothing",)).trains_all and not some.trains_all
    costs = LayerCosts.of_shape(some, 1)
    whole = LayerCosts.of_shape(SHAPE, 1)
    assert whole.layers[0] - costs.layers[0] == pytest.approx(2 * 160)
    assert whole.layers[1] - costs.layers[1] == pytest.approx(2 * (QKV + PROJ + MLP))
    assert whole.output - costs.output == pytest.approx(2 * OUTPUT)


def test_a_tied_output_layer_is_the_embedding():
    tied = replace(SHAPE, tied_embeddings=True).training(("embedding.*",))
    assert not tied.trains_output and not tied.trains_embedding
    assert tied.parameters - tied.trained_parameters == OUTPUT
    assert SHAPE.training(("embedding.*",)).trains_output


def test_some_of_the_experts():
    some = EXPERTS.training(("*.local_experts.[0-2].linear_fc2.*",))
    assert EXPERTS.parameters - some.trained_parameters == 3 * 80
    saved = EXPERTS.expert_parameters - some.worked_expert_parameters
    assert saved == pytest.approx(2 * 80 / 2 / 3)  # two experts a token, half of them frozen
    router = EXPERTS.training(("*.router.*",))  # whose gradient Megatron makes all the same
    assert router.worked_parameters == EXPERTS.active_parameters
    assert EXPERTS.parameters - router.trained_parameters == 48
    tuned = EXPERTS.training((), Adapters(3, ("linear_fc2",)))
    assert tuned.trained_parameters == 6 * 3 * (10 + 8)
    assert tuned.expert_parameters - EXPERTS.expert_parameters == 2 * 3 * (10 + 8)


@pytest.mark.parametrize("recomputed", [0.0, 0.5])
def test_costs_of_a_token(recomputed):
    """What is recomputed is a forward, frozen or not; attention costs what it did."""
    how = {"value_bytes": 2, "recomputed_layers": recomputed}
    whole = cost_model_of_shape(SHAPE, **how)
    tuned = cost_model_of_shape(SHAPE.training((), Adapters(1, ("linear_qkv",))), **how)
    adapters = 2 * (8 + 18)
    again = recomputed * 2 * (LINEAR + adapters)
    expected = 4 * (LINEAR + OUTPUT) + 6 * adapters + again
    assert tuned.b == pytest.approx(expected / 400e12)
    assert whole.b == pytest.approx((6 * (LINEAR + OUTPUT) + recomputed * 2 * LINEAR) / 400e12)
    assert tuned.a == whole.a


def test_a_frozen_projection_makes_hops_of_latents_cheaper():
    layer = replace(SHAPE.layers[0], hidden_size=7168, attention=DEEPSEEK_V3)
    model = replace(SHAPE, layers=(layer,), hidden_size=7168, vocab_size=0)
    up, adapters = ("*.linear_kv_up_proj.*",), Adapters(1, ("linear_kv_up_proj",))
    found = {
        of: ring_ways(of, LLAMA_7B, value_bytes=2, tensor_ranks=1).latent.merge_b
        * (of.worked_parameters - of.worked_expert_parameters)
        for of in (
            model,
            model.training(up),
            model.training((), adapters),
        )
    }
    trained, frozen, adapted = found.values()
    assert frozen / trained == pytest.approx(3 / 4)
    assert adapted == pytest.approx(trained)  # its gradient is that of the sum of both


def test_memory_of_what_is_trained():
    def memory(shape, **others):
        return stage_memory(Job(shape=shape, num_gpus=2, tokens_per_rank=100, **others), 0)

    tuned = SHAPE.training((), Adapters(2, ("linear_proj", "linear_qkv")))
    one = memory(tuned)
    trained = 2 * 2 * ((12 + 8) + (8 + 18))
    assert one.gradients == 4 * trained
    assert one.optimizer == 12 * trained / 2
    assert one.weights == 2 * tuned.parameters
    assert one.activations < memory(SHAPE).activations
    split = memory(tuned, tensor_ranks=2)
    of_columns, of_rows = 8 + 18 / 2, 12 / 2 + 8  # A and B: one of both is shared
    assert split.gradients == 4 * 2 * 2 * (of_columns + of_rows)
    frozen = SHAPE.training(("*",))
    assert memory(frozen).gradients == memory(frozen).optimizer == 0

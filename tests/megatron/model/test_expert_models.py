"""Experts as today's models have them: gradients equal one rank that saw the whole batch."""

from dataclasses import replace

import pytest
import torch

from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.model import building
from megatron_hdp.megatron.options import model_shape
from megatron_hdp.planner.shape import Weights
from tests.megatron.model.test_moe import LENGTHS, ROOM, TENSOR, TOLERANCE, planned
from tests.support.gradients import VOCABULARY, errors_of, moe_arguments, write_corpus

SIGMOID = {
    "num_experts": 8,
    "moe_router_topk": 4,
    "moe_router_score_function": "sigmoid",
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_enable_expert_bias": True,
}
GROUPS = SIGMOID | {"moe_router_num_groups": 4, "moe_router_group_topk": 2}
SHARED = {"moe_shared_expert_intermediate_size": 20}
DENSE_FIRST = {"num_layers": 3, "moe_layer_freq": "[0]+[1]*2"}
GPT_OSS = {
    "add_bias_linear": True,
    "swiglu": False,
    "quick_geglu": True,
    "activation_func_clamp_value": 0.4,
    "glu_linear_offset": 1.0,
}
MODELS = {
    "deepseek": GROUPS | SHARED | DENSE_FIRST,
    "glm": SIGMOID | SHARED | DENSE_FIRST,
    "qwen2-moe": SHARED | {"moe_shared_expert_gate": True},
    "gpt-oss": GPT_OSS,
    "alternating": {"num_layers": 5, "moe_layer_freq": "2"},
}
ACROSS = {"expert_model_parallel_size": 2}
UNEVEN = {"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 1}
VIRTUAL = {
    "pipeline_model_parallel_size": 2,
    "num_virtual_stages_per_pipeline_rank": 2,
    "num_layers": 4,
    "moe_layer_freq": "[0]+[1]*3",
}
# ranks, of them in the HDP dimension, layout
LAYOUTS = {
    "alone": (3, 3, {}),
    "across": (2, 2, ACROSS),
    "stages": (2, 1, UNEVEN | {"hdp_tokens_per_rank": 200}),
    "stages-across": (4, 2, UNEVEN | ACROSS),
    "virtual-stages-across": (4, 2, VIRTUAL | ACROSS),
    "tensor": (4, 2, TENSOR | ACROSS),
    "tensor-across": (4, 2, TENSOR | {"expert_model_parallel_size": 4}),
}


def check(run_ranks, folder, model, layout, **more):
    ranks, hdp_ranks, overrides = LAYOUTS[layout]
    settings = ROOM | MODELS[model] | overrides | more
    arguments = moe_arguments(write_corpus(folder, LENGTHS), **settings)
    cases = [(replace(arguments, hdp_strategy="auto"), None)]
    if hdp_ranks > 1:
        cases.append(planned(arguments, hdp_ranks))
    errors = run_ranks(ranks, errors_of, cases)[0]
    assert max(errors) <= TOLERANCE, errors


FAST = [("deepseek", "across"), ("glm", "stages"), ("qwen2-moe", "across"), ("gpt-oss", "tensor")]
GRID = [(model, layout) for model in MODELS for layout in LAYOUTS]


@pytest.mark.parametrize(
    ("model", "layout"),
    [case if case in FAST else pytest.param(*case, marks=pytest.mark.slow) for case in GRID],
)
def test_gradients(run_ranks, tmp_path, model, layout):
    check(run_ranks, tmp_path, model, layout)


def choice_in_use(self, logits, routing_map):
    return routing_map


def float32(self):
    return torch._C.TensorBase.float(self)


@pytest.mark.parametrize(
    "fault",
    [
        ("megatron_hdp.megatron.model.router.HdpRouter._preferred", choice_in_use),
        ("torch.Tensor.float", float32),
    ],
    ids=["balanced-by-the-biased-choice", "sigmoid-in-float32"],
)
def test_a_planted_fault_fails_the_check(run_ranks, tmp_path, fault):
    settings = ROOM | MODELS["deepseek"] | ACROSS
    arguments = moe_arguments(write_corpus(tmp_path, LENGTHS), **settings)
    errors = run_ranks(2, errors_of, [planned(arguments, 2)], fault)[0]
    assert min(errors) > 1e-9, errors


def parameters_of(runs):
    """Body of a rank: what the cost model of each run takes for its parameters."""
    counts = []
    for run in runs:
        parallel.initialise(run)
        parallel.set_seeds(1)
        counts.append(parallel.num_parameters(building.build_chunks(run, VOCABULARY)))
        parallel.finish()
    return counts


def test_only_routed_experts_of_sparse_layers_are_shared(run_ranks, tmp_path):
    alone = moe_arguments(write_corpus(tmp_path, [5]), **MODELS["deepseek"])
    runs = [alone, replace(alone, **ACROSS), replace(alone, **UNEVEN)]
    counts = run_ranks(2, parameters_of, runs)[0]
    shape = model_shape(alone, building.padded_vocab_size(VOCABULARY, alone))
    dense = sum((layer.weights for layer in shape.layers), Weights())
    others = dense.split + dense.whole + 2 * shape.embedding + shape.last_norm
    assert counts == [(others, shape.expert_parameters)] * 3

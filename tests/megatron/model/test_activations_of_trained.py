"""What autograd saves where weights are frozen or adapters are trained equals the formula.

On CPUs a norm keeps its normalized values for the gradient of its gain alone, see
`test_activation_formula`.
"""

from dataclasses import replace

import pytest

from megatron_hdp.cli.checking import job_of
from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.model import building
from megatron_hdp.megatron.options import model_shape
from megatron_hdp.planner.memory import stage_memory
from megatron_hdp.planner.memory.activations import kept_bytes
from tests.gradient_equivalence.case import TP2_SP
from tests.gradient_equivalence.settings import SELECTIVE, recomputing
from tests.megatron.model.test_activation_formula import (
    BF16,
    EXPERTS,
    LATENT,
    MLA_SHAPE,
    SHAPE,
    counted,
    expected,
    tolerance,
)
from tests.support.gradients import VOCABULARY, moe_arguments, tiny_arguments, write_corpus

ADAPTERS = {"lora_rank": 4}
LATENTS = (
    *("linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj"),
    *("linear_proj", "linear_fc1", "linear_fc2"),
)
OF_LATENTS = ADAPTERS | {"lora_targets": LATENTS}
BIAS_STAYS = {"moe_router_bias_update_rate": 0.0}


def frozen(*patterns):
    return {"hdp_frozen": patterns}


PLAIN = {
    "adapters": ADAPTERS,
    "adapters-bf16": ADAPTERS | BF16,
    "adapters-of-one": ADAPTERS | BF16 | {"lora_targets": ("linear_proj",)},
    "adapters-selective": ADAPTERS | SELECTIVE,
    "adapters-mlp-recomputed": ADAPTERS | recomputing("mlp", "layernorm"),
    "into": frozen("*.linear_fc1.*", "*.linear_qkv.*"),
    "out": frozen("*.linear_fc2.*", "*.linear_proj.*") | BF16,
    "norms": frozen("*layernorm*") | BF16,
    "all-but-norms": frozen("*embedding*", "output_layer.*", "*.linear_*"),
}
OF_MLA = {
    "adapters": OF_LATENTS | MLA_SHAPE | BF16,
    "up": frozen("*_up_proj*") | MLA_SHAPE,
    "up-without-norms": frozen("*_up_proj*") | LATENT["latent-without-norms"],
    "down": frozen("*_down_proj*") | MLA_SHAPE | BF16,
}
MIXED = {
    "adapters": ADAPTERS | BF16,
    "adapters-shared": ADAPTERS | EXPERTS["shared-gated"],
    "adapters-recomputed": ADAPTERS | EXPERTS["recomputed"],
    "adapters-float32-router": ADAPTERS | EXPERTS["float32-router"] | BIAS_STAYS,
    "experts": frozen("*.experts.*"),
    "one-expert": frozen("*.local_experts.0.*"),
    "router": frozen("*router*", "*layernorm*"),
    "shared": frozen("*shared_experts*", "*router*") | EXPERTS["shared-gated"],
}


def without_gains(arguments):
    """Bytes of a token that norms do not keep on CPUs where their gains are frozen."""
    (layer, *_), again = model_shape(arguments, VOCABULARY).layers, arguments.recompute_modules
    kept = 0
    for one in layer.tensors:
        if "norm.weight" in one.name and not layer.trained(one):
            is_latents = one.name.startswith("self_attention")
            kept += 0 if "layernorm" in (again or ()) and not is_latents else 4 * one.rows
    return kept / (arguments.tensor_model_parallel_size if arguments.sequence_parallel else 1)


def require_near(arguments, measured, world=1, name=""):
    """Bytes of a token within the router's few of `tolerance`; parameters to the last one."""
    bytes_, parameters = measured
    of_formula, counted_up = expected(arguments, world)
    right = of_formula - without_gains(arguments)
    assert bytes_ == pytest.approx(right, abs=tolerance(arguments)), name
    assert parameters == counted_up, name


@pytest.mark.parametrize(
    ("arguments_of", "named"),
    [(tiny_arguments, PLAIN), (tiny_arguments, OF_MLA), (moe_arguments, MIXED)],
    ids=["plain", "latents", "experts"],
)
def test_on_one_rank(run_ranks, tmp_path, arguments_of, named):
    """And a share of what an expert keeps is what its share of the tokens is."""
    prefix = write_corpus(tmp_path, [64])
    cases = [arguments_of(prefix, **SHAPE | case) for case in named.values() if case]
    found = run_ranks(1, counted, cases)[0]
    for name, arguments, measured in zip(named, cases, found, strict=True):
        if name != "one-expert":
            require_near(arguments, measured, name=name)
        else:
            job = job_of(arguments, 1, VOCABULARY)
            whole = job_of(replace(arguments, hdp_frozen=()), 1, VOCABULARY)
            one, other = (kept_bytes(of, of.shape.layers[0]) for of in (job, whole))
            number = arguments.num_experts
            inputs = "experts' inputs"
            assert one[inputs] == pytest.approx(other[inputs] * (number - 1) / number)


def test_between_tensor_ranks(run_ranks, tmp_path):
    prefix = write_corpus(tmp_path, [64])
    kinds = (ADAPTERS, ADAPTERS | BF16, OF_LATENTS | MLA_SHAPE | BF16, frozen("*.linear_fc2.*"))
    cases = [tiny_arguments(prefix, **SHAPE | TP2_SP | case) for case in kinds]
    for found in run_ranks(2, counted, cases):
        for arguments, measured in zip(cases, found, strict=True):
            require_near(arguments, measured, 2)


def trained_numbers(cases):
    """Body of a rank: parameters of each model, and those that are trained."""
    found = []
    parallel.initialise(cases[0])
    for arguments in cases:
        gpt = building.build_gpt(arguments, VOCABULARY)
        parameters = [*gpt.parameters()]
        trained = sum(one.numel() for one in parameters if one.requires_grad)
        found.append((sum(one.numel() for one in parameters), trained))
    return found


TIED = {"untie_embeddings_and_output_weights": False}
GATED = EXPERTS["shared-gated"]
FURTHER = {"mtp_num_layers": 2}
MODELS = {
    "plain": (tiny_arguments, frozen("decoder.layers.[01].*")),
    "biased": (tiny_arguments, ADAPTERS | {"add_bias_linear": True, "qk_layernorm": True}),
    "layernorm": (tiny_arguments, frozen("*layernorm.bias") | {"normalization": "LayerNorm"}),
    "tied": (
        tiny_arguments,
        frozen("embedding.*") | {"untie_embeddings_and_output_weights": False},
    ),
    "further": (tiny_arguments, frozen("mtp.layers.1.*", "*norm.*", "output_layer.*") | FURTHER),
    "further-adapters": (tiny_arguments, ADAPTERS | FURTHER),
    "latents": (tiny_arguments, OF_MLA["down"]),
    "sinks": (tiny_arguments, frozen("*softmax_offset") | {"softmax_type": "learnable"}),
    "experts": (moe_arguments, ADAPTERS | GATED),
    "some-experts": (moe_arguments, frozen("*.local_experts.1.*fc2*", "*gate_weight") | GATED),
    "biased-experts": (moe_arguments, frozen("*router*") | EXPERTS["biased"]),
}


def test_trained_weights_are_those_that_have_gradients(run_ranks, tmp_path):
    """Of every kind of model, by name; FLOP of a token fall by a third of what is frozen."""
    prefix = write_corpus(tmp_path, [64])
    cases = [of(prefix, **SHAPE | case) for of, case in MODELS.values()]
    for name, arguments, found in zip(
        MODELS, cases, run_ranks(1, trained_numbers, cases)[0], strict=True
    ):
        job = job_of(arguments, 1, VOCABULARY)
        memory, shape = stage_memory(job, 0), job.shape
        number = memory.weights / job.value_bytes
        assert (number, memory.gradients / 4) == found, name
        assert (shape.parameters, shape.trained_parameters) == found, name
        assert memory.optimizer == (12 if job.bf16 else 8) * found[1], name

"""The formula of kept activations equals what autograd saves; parameters are counted rightly.

The formula is of GPUs. On CPUs three functions keep more, because they are not fused there:

- PyTorch's norm keeps its input in float32 and the normalized values in float32, instead of the
  input as it is (and the statistics, on both);
- SwiGLU keeps, beside what it was given, the SiLU of one half and the other half plus zero;
- an expert also keeps its activation before it is weighted.

All other tensors are the same on both, and with these added the sums are equal.
"""

from functools import partial
from unittest import mock

import pytest
from megatron.core import package_info
from megatron.core.utils import get_attr_wrapped_model
from packaging.version import Version

from megatron_hdp.cli.checking import job_of
from megatron_hdp.data.steps import padding_micro_batch
from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.execution import HdpExecutor
from megatron_hdp.megatron.execution.model_pass import StepInProgress
from megatron_hdp.megatron.model import building
from megatron_hdp.megatron.step import setup
from megatron_hdp.planner.memory.activations import (
    kept_after_forward,
    kept_bytes,
    kept_of_further,
)
from megatron_hdp.planner.memory.gpu import stage_memory
from megatron_hdp.runtime.timeline import Timeline
from tests.gradient_equivalence.case import TP2_SP, emptied_outputs
from tests.gradient_equivalence.settings import RECOMPUTE, SELECTIVE, recomputing
from tests.support.gradients import VOCABULARY, moe_arguments, tiny_arguments, write_corpus
from tests.support.mla import MLA

SHAPE = {
    "num_layers": 3,
    "hidden_size": 64,
    "ffn_hidden_size": 160,
    "kv_channels": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "add_bias_linear": False,
    "fp64": False,
}
_INT64, _FLOAT32 = 8, 4
BF16 = {"bf16": True}
ONE_RANK = {
    "bf16": BF16,
    "float32": {},
    "wide": BF16 | {"hidden_size": 128, "ffn_hidden_size": 96, "num_query_groups": 4},
    "multi-query": BF16 | {"num_query_groups": 1, "rotary_percent": 0.5},
    "yarn": BF16 | {"position_embedding_type": "yarn", "rotary_scaling_factor": 4.0},
    "no-positions": BF16 | {"position_embedding_type": "none"},
    "no-positions-in-layers": BF16 | {"no_rope_freq": "1", "num_query_groups": 4},
    "windows-and-sinks": BF16
    | {"window_size": "9,0", "window_attn_skip_freq": "2", "softmax_type": "learnable"},
    "full-recompute": BF16 | RECOMPUTE,
    "selective-recompute": BF16 | SELECTIVE,
    "norms-recomputed": BF16 | recomputing("layernorm"),
    "mlp-recomputed": recomputing("mlp", "core_attn"),
    "norms-mlp-recomputed": BF16 | recomputing("mlp", "layernorm"),
}


MLA_SHAPE = MLA | {"kv_lora_rank": 24, "q_lora_rank": 20, "qk_head_dim": 16, "v_head_dim": 12}
MLA_SHAPE |= {"qk_pos_emb_head_dim": 8}
LATENT = {
    "latent-bf16": MLA_SHAPE | BF16,
    "latent": MLA_SHAPE,
    "latent-without-norms": MLA_SHAPE | BF16 | {"qk_layernorm": False},
    "latent-without-queries'": MLA_SHAPE | BF16 | {"q_lora_rank": None},
    "latent-selective": MLA_SHAPE | BF16 | SELECTIVE,
    "latent-norms-recomputed": MLA_SHAPE | recomputing("layernorm"),
}
SIGMOID = {"num_experts": 8, "moe_router_score_function": "sigmoid"}
GROUPS = SIGMOID | {"moe_router_num_groups": 4, "moe_router_group_topk": 2}
EXPERTS = {
    "experts": {},
    "experts-bf16": BF16 | {"num_experts": 8},
    "shared": BF16 | {"moe_shared_expert_intermediate_size": 48},
    "shared-gated": {"moe_shared_expert_intermediate_size": 48, "moe_shared_expert_gate": True},
    "sigmoid": BF16 | SIGMOID,
    "bias": BF16 | SIGMOID | {"moe_router_enable_expert_bias": True},
    "groups": BF16 | GROUPS | {"moe_router_enable_expert_bias": True},
    "float32-router": BF16 | GROUPS | {"moe_router_dtype": "fp32"},
    "biased": BF16 | {"add_bias_linear": True},
}
EXPERTS["recomputed"] = EXPERTS["shared-gated"] | BF16 | recomputing("layernorm", "shared_experts")


EXECUTOR, STEP, EXAMPLE = HdpExecutor.__module__, StepInProgress, padding_micro_batch


@emptied_outputs()
def counted(cases):
    """Of each case what the executor counts, in bytes of a token and layer, and the parameters.

    With MTP of the first layer of further tokens, which keeps more than others.
    """
    found = []
    parallel.initialise(cases[0])
    for arguments in cases:
        parallel.set_seeds(1)
        gpt = building.build_gpt(arguments, VOCABULARY)
        executor = setup.build_executor(arguments, [gpt], Timeline())
        depths = arguments.mtp_num_layers or 0
        if depths:
            model = get_attr_wrapped_model(gpt, "mtp", return_model_obj=True)
            executor.layers = [*model.decoder.layers, *model.mtp.layers]
        with (
            mock.patch(f"{EXECUTOR}.StepInProgress", partial(STEP, mtp_weights=(1.0,) * depths)),
            mock.patch(f"{EXECUTOR}.padding_micro_batch", partial(EXAMPLE, num_further=depths)),
        ):
            bytes_ = executor.activation_bytes_per_token()
        found.append((bytes_, sum(parameter.numel() for parameter in gpt.parameters())))
    return found


def more_on_cpus(job, layer=None):
    """Bytes of a token and layer that the formula leaves out: what unfused functions keep.

    Of the model's first layer unless another is given.
    """
    layer = layer or job.shape.layers[0]
    if job.recompute == "full":
        return (
            4 * layer.attention.qk_channels
        )  # angles that all layers share, counted to the first; on GPUs too
    b, mlp, again = job.value_bytes, layer.mlp, job.recomputed_modules
    width = mlp.ffn_hidden_size
    norms = _more_of_latents(job, layer)
    if "layernorm" not in again:
        norms += 2 * job.token_share * (8 - b) * job.shape.hidden_size
    if mlp.num_experts:
        shared = 2 * b * mlp.shared_ffn_hidden_size / job.tensor_ranks
        shared *= "shared_experts" not in again
        return norms + shared + 3 * b * width * mlp.experts_per_token * job.token_share
    return norms + 2 * b * width / job.tensor_ranks * ("mlp" not in again)


def _more_of_latents(job, layer):
    """The same of latents' norms; in float32 their input is what was projected, on both."""
    b, attention = job.value_bytes, layer.attention
    if not (attention.kv_rank and attention.qk_norm):
        return 0
    views = b * attention.shared_channels if job.token_share == 1 and b < 4 else 0
    return job.token_share * (8 - b) * (attention.kv_rank + attention.q_rank) - views


def tolerance(arguments):
    """A router keeps a few numbers of no token; from 0.17 on places as indices, or scores again."""
    if Version(package_info.__version__) < Version("0.17") or not arguments.num_experts:
        return 0.5
    return _INT64 * arguments.moe_router_topk + _FLOAT32 * arguments.num_experts


def expected(arguments, world=1):
    job = job_of(arguments, world, VOCABULARY)
    num_parameters = stage_memory(job, 0).weights / job.value_bytes
    return kept_after_forward(job) + more_on_cpus(job), num_parameters


def require_near(measured, right, arguments, name=""):
    (bytes_, parameters), (of_formula, counted_up) = measured, right
    assert bytes_ == pytest.approx(of_formula, abs=tolerance(arguments)), name
    assert parameters == counted_up, name


@pytest.mark.parametrize(
    ("arguments_of", "named"),
    [(tiny_arguments, ONE_RANK), (tiny_arguments, LATENT), (moe_arguments, EXPERTS)],
    ids=["plain", "latents", "experts"],
)
def test_on_one_rank(run_ranks, tmp_path, arguments_of, named):
    prefix = write_corpus(tmp_path, [64])
    cases = [arguments_of(prefix, **SHAPE | case) for case in named.values()]
    found = run_ranks(1, counted, cases)[0]
    for name, arguments, measured in zip(named, cases, found, strict=True):
        require_near(measured, expected(arguments), arguments, name)


FURTHER = {"mtp_num_layers": 2}


def test_layers_of_further_tokens(run_ranks, tmp_path):
    prefix = write_corpus(tmp_path, [64])
    kinds = (BF16, {}, LATENT["latent-bf16"])
    cases = [tiny_arguments(prefix, **SHAPE | FURTHER | case) for case in kinds]
    of_experts = BF16 | {"moe_layer_freq": "[0]*2+[1]", "moe_shared_expert_intermediate_size": 48}
    cases.append(moe_arguments(prefix, **SHAPE | FURTHER | of_experts))
    for arguments, measured in zip(cases, run_ranks(1, counted, cases)[0], strict=True):
        job = job_of(arguments, 1, VOCABULARY)
        three_norms = 3 * (8 - job.value_bytes) * job.shape.hidden_size
        labels = _INT64 * (1 + arguments.mtp_num_layers)  # the micro-batch's, which are embedded
        more = more_on_cpus(job, job.shape.further[0]) + three_norms + labels
        right = kept_of_further(job) / 2 + more, stage_memory(job, 0).weights / job.value_bytes
        require_near(measured, right, arguments)


def test_between_tensor_ranks(run_ranks, tmp_path):
    prefix = write_corpus(tmp_path, [64])
    both = (BF16, {}, LATENT["latent-bf16"], LATENT["latent"], LATENT["latent-without-norms"])
    cases = [tiny_arguments(prefix, **SHAPE | TP2_SP | case) for case in both]
    for found in run_ranks(2, counted, cases):
        assert found == [expected(arguments, 2) for arguments in cases]


def test_of_shared_experts_between_tensor_ranks(run_ranks, tmp_path):
    """Experts cut over the same ranks, each of which has all tokens of them."""
    cut = TP2_SP | {"expert_tensor_parallel_size": 2} | EXPERTS["shared-gated"]
    arguments = moe_arguments(write_corpus(tmp_path, [64]), **SHAPE | BF16 | cut)
    for (measured,) in run_ranks(2, counted, [arguments]):
        require_near(measured, expected(arguments, 2), arguments)


@pytest.mark.parametrize("pattern", ["[0]*2+[1]", "[1]*2+[0]"])
def test_of_dense_layers_beside_sparse_ones(run_ranks, tmp_path, pattern):
    """What the executor counts is the most that one of the layers before the last keeps."""
    shape = SHAPE | BF16 | EXPERTS["shared"] | {"moe_layer_freq": pattern}
    arguments = moe_arguments(write_corpus(tmp_path, [64]), **shape)
    job = job_of(arguments, 1, VOCABULARY)
    layer = job.shape.layers[0]
    of_formula = sum(kept_bytes(job, layer).values()) + more_on_cpus(job, layer)
    (measured,) = run_ranks(1, counted, [arguments])[0]
    require_near(measured, (of_formula, expected(arguments)[1]), arguments)


def test_a_tensor_left_out_would_be_seen(tmp_path):
    """No tensor is as small as what the comparison lets pass with 0.16.1."""
    prefix = write_corpus(tmp_path, [64])
    for arguments in (tiny_arguments(prefix, **SHAPE), moe_arguments(prefix, **SHAPE)):
        job = job_of(arguments, 1, VOCABULARY)
        assert min(kept_bytes(job, job.shape.layers[0]).values()) > 0.5

"""The gold test for published models, made small: all that each brings together, at once."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hdp.megatron.options import parse_arguments
from tests.megatron.step.test_exactness import LENGTHS, TOLERANCE, random_case
from tests.support.gradients import write_corpus
from tests.support.mla import errors_of_kind

CONFIGS = Path(__file__).parents[3] / "configs"
MODELS = sorted(path.parent.name for path in CONFIGS.glob("*/32k.yaml"))
QUICK = ("glm-4.5-air", "gpt-oss-20b", "kimi-k2")

SMALL = {
    "num_layers": 4,
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_attention_heads": 4,
    "vocab_size": None,
    "seq_length": 200,
    "max_position_embeddings": 200,
    "init_method_std": 0.3,
    "bf16": False,
    "fp64": True,
    "use_distributed_optimizer": False,
    "hdp_offload": "off",
    "hdp_tokens_per_rank": 128,
    "hdp_global_batch_tokens": None,
    "expert_tensor_parallel_size": 1,
    "tokenizer_type": "byte",
    "tokenizer_model": None,
    "split": "1,0,0",
    "distributed_timeout_minutes": 5,
    "stall_timeout_seconds": 300.0,
}
HEADS = {"num_query_groups": 2, "kv_channels": 8}
LATENT = {
    "num_query_groups": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 5,
}
EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 12, "moe_router_topk": 2}
LAYOUTS = {  # ranks, HDP ranks, overrides
    "rings": (2, 2, {}),
    "stages": (
        4,
        2,
        {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2},
    ),
    "tensor": (4, 2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
}


def small(name, prefix, overrides):
    """The arguments of a published model, with few and small layers of the same kinds."""
    common, model = (str(CONFIGS / "models" / f"{one}.yaml") for one in ("common", name))
    given = ["--config", common, "--config", model, "--seq-length", "200"]
    given += ["--data-path", prefix, "--hdp-tokens-per-rank", "128"]
    arguments = parse_arguments(given)
    changes = SMALL | (LATENT if arguments.multi_latent_attention else HEADS)
    if arguments.position_embedding_type == "yarn" or arguments.multi_latent_attention:
        changes |= {"rotary_base": 300, "yarn_original_max_position_embeddings": 50}
    if arguments.window_size is not None:
        changes["window_size"] = "9,0"
    if arguments.num_experts:
        changes |= EXPERTS
        changes["moe_router_dtype"] = None if arguments.moe_router_dtype is None else "fp64"
        if arguments.moe_shared_expert_intermediate_size:
            changes["moe_shared_expert_intermediate_size"] = 12
        if arguments.moe_router_num_groups:
            changes |= {"moe_router_num_groups": 2, "moe_router_group_topk": 1}
        if arguments.moe_layer_freq != "1":
            changes["moe_layer_freq"] = "[0]+[1]*3"
        # tensor ranks have experts of their own: those with a bias are shared by none
        changes["expert_model_parallel_size"] = overrides.get("tensor_model_parallel_size", 1)
    changes |= {"global_batch_size": len(LENGTHS)} | overrides
    return replace(arguments, **changes)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(
            *(name, layout),
            marks=() if layout == "rings" and name in QUICK else pytest.mark.slow,
        )
        for name in MODELS
        for layout in LAYOUTS
    ],
)
def test_gradients_equal_one_rank_over_the_whole_batch(run_ranks, tmp_path, name, layout):
    ranks, replicas, overrides = LAYOUTS[layout]
    arguments = small(name, write_corpus(tmp_path, LENGTHS), overrides)
    cases = [(arguments, None), random_case(arguments, replicas)]
    errors = run_ranks(ranks, errors_of_kind, cases)[0]
    assert max(errors) <= TOLERANCE, errors

"""DeepSeek-V3 with its multi-latent attention, and Kimi-K2, which is one by its files."""

from __future__ import annotations

from typing import Any

from megatron_hdp.convert.families import rows
from megatron_hdp.convert.families.experts import (
    FIRST_DENSE,
    expert_sizes,
    mtp_layers,
    sigmoid_flags,
)
from megatron_hdp.convert.families.flags import plain_flags
from megatron_hdp.convert.families.table import Config, Family, Layers, Row


def _sizes(config: Config) -> dict[str, int]:
    heads, rotated = config["num_attention_heads"], config["qk_rope_head_dim"]
    plain, value = config["qk_nope_head_dim"], config["v_head_dim"]
    found = {
        **expert_sizes(config),
        "queries": heads * (plain + rotated),
        "latent": config["kv_lora_rank"],
        "latent_and_rotated": config["kv_lora_rank"] + rotated,
        "keys_and_values": heads * (plain + value),
        "values": heads * value,
    }
    if rank := config.get("q_lora_rank"):
        found["query_latent"] = rank
    return found


def _flags(config: Config) -> dict[str, Any]:
    flags = {
        **plain_flags(config),
        **sigmoid_flags(config),
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "kv_lora_rank": config["kv_lora_rank"],
        "qk_head_dim": config["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": config["qk_rope_head_dim"],
        "v_head_dim": config["v_head_dim"],
    }
    if rank := config.get("q_lora_rank"):
        flags["q_lora_rank"] = rank
    for unused in ("group_query_attention", "num_query_groups", "kv_channels"):
        del flags[unused]
    flags["rope_type"] = flags["position_embedding_type"]
    flags["position_embedding_type"] = "rope"  # of the layers without a latent
    if flags.get("mscale", 1.0) != flags.get("mscale_all_dim", flags.get("mscale", 1.0)):
        raise ValueError(
            f"rope scaling: found mscale {flags['mscale']} and mscale_all_dim "
            f"{flags['mscale_all_dim']}, expected the same: Megatron scales scores by the one, "
            "transformers by the other"
        )
    return flags


def _has_latent_queries(config: Config) -> bool:
    return bool(config.get("q_lora_rank"))


_ATTENTION = (
    Row("input_layernorm.weight", {"input_layernorm.weight": "hidden"}),
    Row(
        "self_attention.linear_q_proj.weight",
        {"self_attn.q_proj.weight": "queries hidden"},
        when=lambda config: not _has_latent_queries(config),
    ),
    Row(
        "self_attention.linear_q_down_proj.weight",
        {"self_attn.q_a_proj.weight": "query_latent hidden"},
        when=_has_latent_queries,
    ),
    Row(
        "self_attention.q_layernorm.weight",
        {"self_attn.q_a_layernorm.weight": "query_latent"},
        when=_has_latent_queries,
        also=("self_attention.linear_q_up_proj.layer_norm_weight",),  # of TransformerEngine
    ),
    Row(
        "self_attention.linear_q_up_proj.weight",
        {"self_attn.q_b_proj.weight": "queries query_latent"},
        when=_has_latent_queries,
    ),
    Row(
        "self_attention.linear_kv_down_proj.weight",
        {"self_attn.kv_a_proj_with_mqa.weight": "latent_and_rotated hidden"},
    ),
    Row(
        "self_attention.kv_layernorm.weight",
        {"self_attn.kv_a_layernorm.weight": "latent"},
        also=("self_attention.linear_kv_up_proj.layer_norm_weight",),
    ),
    Row(
        "self_attention.linear_kv_up_proj.weight",
        {"self_attn.kv_b_proj.weight": "keys_and_values latent"},
    ),
    Row("self_attention.linear_proj.weight", {"self_attn.o_proj.weight": "hidden values"}),
    Row(
        "pre_mlp_layernorm.weight",
        {"post_attention_layernorm.weight": "hidden"},
        also=("mlp.linear_fc1.layer_norm_weight",),  # before a plain MLP, of TransformerEngine
    ),
)

DEEPSEEK = Family(
    name="DeepSeek-V3",
    architectures=("DeepseekV3ForCausalLM",),
    sizes=_sizes,
    flags=_flags,
    layers=(Layers(_ATTENTION), *FIRST_DENSE),
    expected={
        **rows.NO_BIAS,
        "norm_topk_prob": (True,),
        "rope_interleave": (True,),
        "scoring_func": ("sigmoid",),
        "moe_layer_freq": (1,),
    },
    left_out=mtp_layers,
)

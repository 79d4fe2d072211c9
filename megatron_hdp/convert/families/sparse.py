"""Families with a mixture of experts and grouped queries: Mixtral, Qwen3-MoE, GLM-4.5, gpt-oss."""

from __future__ import annotations

from typing import Any

from megatron_hdp.convert.families import rows
from megatron_hdp.convert.families.flags import plain_flags, sizes_of, window_flags
from megatron_hdp.convert.families.layouts import IN_TURNS, TRANSPOSED
from megatron_hdp.convert.families.table import Config, Family, Layers, Row

_NUM_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")


def expert_sizes(config: Config) -> dict[str, int]:
    """What tables speak of where there are experts."""
    ffn = config.get("moe_intermediate_size") or config["intermediate_size"]
    found = {
        **sizes_of(config),
        "experts": next(config[name] for name in _NUM_EXPERTS if config.get(name)),
        "expert_ffn": ffn,
    }
    if shared := config.get("n_shared_experts"):
        found["shared_ffn"] = shared * ffn
    return found


def expert_flags(config: Config) -> dict[str, Any]:
    """The flags of experts without a bias in their choice."""
    sizes = expert_sizes(config)
    return {
        "num_experts": sizes["experts"],
        "moe_ffn_hidden_size": sizes["expert_ffn"],
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": config.get("router_aux_loss_coef", 0.0),
        "moe_token_dispatcher_type": "alltoall",
    }


def sigmoid_flags(config: Config) -> dict[str, Any]:
    """The flags of experts chosen by sigmoid scores and a bias, the first layers being dense.

    Raises:
        ValueError: groups are chosen by more or less experts than in Megatron.
    """
    sizes, groups = expert_sizes(config), config.get("n_group") or 1
    flags = {
        **expert_flags(config),
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",
        "moe_router_topk_scaling_factor": float(config["routed_scaling_factor"]),
        "moe_shared_expert_intermediate_size": sizes["shared_ffn"],
    }
    if first := config["first_k_dense_replace"]:
        flags["moe_layer_freq"] = f"[0]*{first}+[1]*{sizes['layers'] - first}"
    if groups > 1:
        flags["moe_router_num_groups"] = groups
        flags["moe_router_group_topk"] = config["topk_group"]
        if config["num_experts_per_tok"] // config["topk_group"] != 2:
            raise ValueError(
                f"found num_experts_per_tok {config['num_experts_per_tok']} of topk_group "
                f"{config['topk_group']} groups, expected two in each: transformers scores a group "
                "by its two best experts, Megatron by as many as it gives"
            )
    return flags


def _is_dense(config: Config, layer: int) -> bool:
    return bool(layer < config["first_k_dense_replace"])


def _is_sparse(config: Config, layer: int) -> bool:
    return not _is_dense(config, layer)


FIRST_DENSE = (
    Layers(rows.MLP, _is_dense),
    Layers((*rows.EXPERTS, *rows.EXPERT_BIAS, *rows.SHARED_EXPERTS), _is_sparse),
)
"""Plain MLPs in the first layers, experts with a bias and shared ones in the others."""


def further_tokens(config: Config) -> tuple[str, ...]:
    """Patterns of the layers behind the last, which predict further tokens."""
    first, number = config["num_hidden_layers"], config.get("num_nextn_predict_layers") or 0
    return tuple(f"model.layers.{layer}.*" for layer in range(first, first + number))


_MIXTRAL_EXPERTS = (
    Row("mlp.router.weight", {"block_sparse_moe.gate.weight": "experts hidden"}),
    Row(
        "mlp.experts.experts.linear_fc1.weight",
        {
            "block_sparse_moe.experts.{e}.w1.weight": "expert_ffn hidden",
            "block_sparse_moe.experts.{e}.w3.weight": "expert_ffn hidden",
        },
    ),
    Row(
        "mlp.experts.experts.linear_fc2.weight",
        {"block_sparse_moe.experts.{e}.w2.weight": "hidden expert_ffn"},
    ),
)

MIXTRAL = Family(
    name="Mixtral",
    architectures=("MixtralForCausalLM",),
    sizes=expert_sizes,
    flags=lambda config: {
        **plain_flags(config),
        **expert_flags(config),
        **window_flags(config.get("sliding_window")),
    },
    outer=rows.OUTER,
    layers=(Layers((*rows.NORMS, *rows.ATTENTION, *_MIXTRAL_EXPERTS)),),
    expected=rows.NO_BIAS,
)

QWEN3_MOE = Family(
    name="Qwen3-MoE",
    architectures=("Qwen3MoeForCausalLM",),
    sizes=expert_sizes,
    flags=lambda config: {
        **plain_flags(config),
        **expert_flags(config),
        "qk_layernorm": True,
        "moe_router_pre_softmax": not config.get("norm_topk_prob", False),
    },
    outer=rows.OUTER,
    layers=(Layers((*rows.NORMS, *rows.ATTENTION, *rows.QK_NORMS, *rows.EXPERTS)),),
    expected={
        **rows.NO_BIAS,
        **rows.WINDOW_OFF,
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([],),
    },
)


def _glm_flags(config: Config) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    return {
        **plain_flags(config),
        **sigmoid_flags(config),
        "add_qkv_bias": bool(config.get("attention_bias")),
        "qk_layernorm": bool(config.get("use_qk_norm")),
        "rotary_percent": share,
    }


_GLM_ATTENTION = (
    *rows.NORMS,
    *rows.ATTENTION,
    *(row.only_if(lambda config: bool(config.get("attention_bias"))) for row in rows.QKV_BIAS),
    *(row.only_if(lambda config: bool(config.get("use_qk_norm"))) for row in rows.QK_NORMS),
)

GLM = Family(
    name="GLM-4.5",
    architectures=("Glm4MoeForCausalLM",),
    sizes=expert_sizes,
    flags=_glm_flags,
    outer=rows.OUTER,
    layers=(Layers(_GLM_ATTENTION), *FIRST_DENSE),
    expected={
        "hidden_act": ("silu",),
        "norm_topk_prob": (True,),
    },
    left_out=further_tokens,
)


def _gpt_oss_flags(config: Config) -> dict[str, Any]:
    kinds = config.get("layer_types") or [
        "sliding_attention" if layer % 2 == 0 else "full_attention"
        for layer in range(config["num_hidden_layers"])
    ]
    return {
        **plain_flags(config),
        **expert_flags(config),
        "swiglu": False,
        "quick_geglu": True,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": float(config.get("swiglu_limit", 7.0)),
        "add_bias_linear": True,
        "softmax_type": "learnable",
        **window_flags(config.get("sliding_window"), [one == "sliding_attention" for one in kinds]),
    }


_GPT_OSS_EXPERTS = (
    Row("mlp.router.weight", {"mlp.router.weight": "experts hidden"}),
    Row("mlp.router.bias", {"mlp.router.bias": "experts"}),
    Row(
        "mlp.experts.experts.linear_fc1.weight",
        {"mlp.experts.gate_up_proj[e]": "hidden both_ffn"},
        IN_TURNS,
    ),
    Row(
        "mlp.experts.experts.linear_fc1.bias",
        {"mlp.experts.gate_up_proj_bias[e]": "both_ffn"},
        IN_TURNS,
    ),
    Row(
        "mlp.experts.experts.linear_fc2.weight",
        {"mlp.experts.down_proj[e]": "expert_ffn hidden"},
        TRANSPOSED,
    ),
    Row("mlp.experts.experts.linear_fc2.bias", {"mlp.experts.down_proj_bias[e]": "hidden"}),
)

_GPT_OSS_ATTENTION = (
    *rows.ATTENTION,
    *rows.QKV_BIAS,
    Row("self_attention.linear_proj.bias", {"self_attn.o_proj.bias": "hidden"}),
    Row("self_attention.core_attention.softmax_offset", {"self_attn.sinks": "heads"}),
)


def _gpt_oss_sizes(config: Config) -> dict[str, int]:
    sizes = expert_sizes(config)
    return {
        **sizes,
        "heads": config["num_attention_heads"],
        "both_ffn": 2 * sizes["expert_ffn"],
    }


GPT_OSS = Family(
    name="gpt-oss",
    architectures=("GptOssForCausalLM",),
    sizes=_gpt_oss_sizes,
    flags=_gpt_oss_flags,
    outer=rows.OUTER,
    layers=(Layers((*rows.NORMS, *_GPT_OSS_ATTENTION, *_GPT_OSS_EXPERTS)),),
    expected={
        "hidden_act": ("silu",),
        "attention_bias": (True,),
        "swiglu_alpha": (1.702,),
    },
)

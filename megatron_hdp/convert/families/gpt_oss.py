"""gpt-oss."""

from __future__ import annotations

from typing import Any

from megatron_hdp.convert.families import rows
from megatron_hdp.convert.families.experts import expert_flags, expert_sizes
from megatron_hdp.convert.families.flags import plain_flags, window_flags
from megatron_hdp.convert.families.layouts import IN_TURNS, TRANSPOSED
from megatron_hdp.convert.families.table import Config, Family, Layers, Row


def _flags(config: Config) -> dict[str, Any]:
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


_EXPERTS = (
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

_ATTENTION = (
    *rows.ATTENTION,
    *rows.QKV_BIAS,
    Row("self_attention.linear_proj.bias", {"self_attn.o_proj.bias": "hidden"}),
    Row("self_attention.core_attention.softmax_offset", {"self_attn.sinks": "heads"}),
)


def _sizes(config: Config) -> dict[str, int]:
    sizes = expert_sizes(config)
    return {
        **sizes,
        "heads": config["num_attention_heads"],
        "both_ffn": 2 * sizes["expert_ffn"],
    }


GPT_OSS = Family(
    name="gpt-oss",
    architectures=("GptOssForCausalLM",),
    sizes=_sizes,
    flags=_flags,
    layers=(Layers((*rows.NORMS, *_ATTENTION, *_EXPERTS)),),
    expected={
        "hidden_act": ("silu",),
        "attention_bias": (True,),
        "swiglu_alpha": (1.702,),
    },
)

"""Rows that families of models share, under Hugging Face's usual names."""

from __future__ import annotations

from megatron_hdp.convert.families.layouts import BY_GROUP
from megatron_hdp.convert.families.table import Row

NO_BIAS = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
}
WINDOW_OFF = {"use_sliding_window": (False,)}

NORMS = (
    Row("self_attention.linear_qkv.layer_norm_weight", {"input_layernorm.weight": "hidden"}),
    Row(
        "mlp.linear_fc1.layer_norm_weight",
        {"post_attention_layernorm.weight": "hidden"},
        also=("pre_mlp_layernorm.weight",),  # before experts, of TransformerEngine's specification
    ),
)

ATTENTION = (
    Row(
        "self_attention.linear_qkv.weight",
        {
            "self_attn.q_proj.weight": "query hidden",
            "self_attn.k_proj.weight": "key hidden",
            "self_attn.v_proj.weight": "key hidden",
        },
        BY_GROUP,
    ),
    Row("self_attention.linear_proj.weight", {"self_attn.o_proj.weight": "hidden query"}),
)

QKV_BIAS = (
    Row(
        "self_attention.linear_qkv.bias",
        {
            "self_attn.q_proj.bias": "query",
            "self_attn.k_proj.bias": "key",
            "self_attn.v_proj.bias": "key",
        },
        BY_GROUP,
    ),
)

QK_NORMS = (
    Row("self_attention.q_layernorm.weight", {"self_attn.q_norm.weight": "head"}),
    Row("self_attention.k_layernorm.weight", {"self_attn.k_norm.weight": "head"}),
)

MLP = (
    Row(
        "mlp.linear_fc1.weight",
        {"mlp.gate_proj.weight": "ffn hidden", "mlp.up_proj.weight": "ffn hidden"},
    ),
    Row("mlp.linear_fc2.weight", {"mlp.down_proj.weight": "hidden ffn"}),
)

EXPERT_BIAS = (Row("mlp.router.expert_bias", {"mlp.gate.e_score_correction_bias": "experts"}),)

SHARED_EXPERTS = (
    Row(
        "mlp.shared_experts.linear_fc1.weight",
        {
            "mlp.shared_experts.gate_proj.weight": "shared_ffn hidden",
            "mlp.shared_experts.up_proj.weight": "shared_ffn hidden",
        },
    ),
    Row(
        "mlp.shared_experts.linear_fc2.weight",
        {"mlp.shared_experts.down_proj.weight": "hidden shared_ffn"},
    ),
)


def experts(module: str, gate: str, up: str, down: str) -> tuple[Row, ...]:
    """A router and gated experts, in the words of a family."""
    one = f"{module}.experts.{{e}}"
    both = {f"{one}.{name}.weight": "expert_ffn hidden" for name in (gate, up)}
    back = {f"{one}.{down}.weight": "hidden expert_ffn"}
    return (
        Row("mlp.router.weight", {f"{module}.gate.weight": "experts hidden"}),
        Row("mlp.experts.experts.linear_fc1.weight", both),
        Row("mlp.experts.experts.linear_fc2.weight", back),
    )


EXPERTS = experts("mlp", "gate_proj", "up_proj", "down_proj")

"""Qwen2.5, Qwen3, Qwen3-MoE, and the language model of Qwen3-VL-MoE."""

from __future__ import annotations

from megatron_hdp.convert.families import rows
from megatron_hdp.convert.families.experts import expert_flags, expert_sizes
from megatron_hdp.convert.families.flags import plain_flags, sizes_of
from megatron_hdp.convert.families.layouts import TRANSPOSED
from megatron_hdp.convert.families.table import Family, Layers, Row

QWEN2 = Family(
    name="Qwen2.5",
    architectures=("Qwen2ForCausalLM",),
    sizes=sizes_of,
    flags=lambda config: {**plain_flags(config), "add_qkv_bias": True},
    layers=(Layers((*rows.NORMS, *rows.ATTENTION, *rows.QKV_BIAS, *rows.MLP)),),
    expected={**rows.NO_BIAS, **rows.WINDOW_OFF},
)

QWEN3 = Family(
    name="Qwen3",
    architectures=("Qwen3ForCausalLM",),
    sizes=sizes_of,
    flags=lambda config: {**plain_flags(config), "qk_layernorm": True},
    layers=(Layers((*rows.NORMS, *rows.ATTENTION, *rows.QK_NORMS, *rows.MLP)),),
    expected={**rows.NO_BIAS, **rows.WINDOW_OFF},
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
    layers=(Layers((*rows.NORMS, *rows.ATTENTION, *rows.QK_NORMS, *rows.EXPERTS)),),
    expected={
        **rows.NO_BIAS,
        **rows.WINDOW_OFF,
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([],),
    },
)

QWEN3_VL_MOE = Family(
    name="Qwen3-VL-MoE",
    architectures=("Qwen3VLMoeTextModel",),
    sizes=lambda config: _with_both(expert_sizes(config)),
    flags=lambda config: {
        **plain_flags(config),
        **expert_flags(config),
        "qk_layernorm": True,
        "moe_router_pre_softmax": False,
    },
    layers=(
        Layers(
            (
                *(*rows.NORMS, *rows.ATTENTION, *rows.QK_NORMS),
                Row("mlp.router.weight", {"mlp.gate.weight": "experts hidden"}),
                Row(
                    "mlp.experts.experts.linear_fc1.weight",
                    {"mlp.experts.gate_up_proj[e]": "hidden both_ffn"},
                    TRANSPOSED,
                ),
                Row(
                    "mlp.experts.experts.linear_fc2.weight",
                    {"mlp.experts.down_proj[e]": "expert_ffn hidden"},
                    TRANSPOSED,
                ),
            )
        ),
    ),
    expected=QWEN3_MOE.expected,
)
"""As published; what transformers 5 saves of a model that it has made itself is turned round."""


def _with_both(sizes: dict[str, int]) -> dict[str, int]:
    return {**sizes, "both_ffn": 2 * sizes["expert_ffn"]}

"""Qwen2.5, Qwen3 and Qwen3-MoE."""

from __future__ import annotations

from megatron_hdp.convert.families import rows
from megatron_hdp.convert.families.experts import expert_flags, expert_sizes
from megatron_hdp.convert.families.flags import plain_flags, sizes_of
from megatron_hdp.convert.families.table import Family, Layers

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

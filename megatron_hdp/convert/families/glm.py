"""GLM-4.5."""

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
from megatron_hdp.convert.families.table import Config, Family, Layers


def _flags(config: Config) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    return {
        **plain_flags(config),
        **sigmoid_flags(config),
        "add_qkv_bias": bool(config.get("attention_bias")),
        "qk_layernorm": bool(config.get("use_qk_norm")),
        "rotary_percent": share,
    }


_ATTENTION = (
    *rows.NORMS,
    *rows.ATTENTION,
    *(row.only_if(lambda config: bool(config.get("attention_bias"))) for row in rows.QKV_BIAS),
    *(row.only_if(lambda config: bool(config.get("use_qk_norm"))) for row in rows.QK_NORMS),
)

GLM = Family(
    name="GLM-4.5",
    architectures=("Glm4MoeForCausalLM",),
    sizes=expert_sizes,
    flags=_flags,
    layers=(Layers(_ATTENTION), *FIRST_DENSE),
    expected={
        "hidden_act": ("silu",),
        "norm_topk_prob": (True,),
    },
    left_out=mtp_layers,
)

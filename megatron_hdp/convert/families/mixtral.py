"""Mixtral."""

from __future__ import annotations

from megatron_hdp.convert.families import rows
from megatron_hdp.convert.families.experts import expert_flags, expert_sizes
from megatron_hdp.convert.families.flags import plain_flags, window_flags
from megatron_hdp.convert.families.table import Family, Layers, Row

_EXPERTS = (
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
    layers=(Layers((*rows.NORMS, *rows.ATTENTION, *_EXPERTS)),),
    expected=rows.NO_BIAS,
)

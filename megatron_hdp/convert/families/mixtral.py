"""Mixtral."""

from __future__ import annotations

from megatron_hdp.convert.families import rows
from megatron_hdp.convert.families.experts import expert_flags, expert_sizes
from megatron_hdp.convert.families.flags import plain_flags, window_flags
from megatron_hdp.convert.families.table import Family, Layers

_EXPERTS = rows.experts("block_sparse_moe", "w1", "w3", "w2")

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

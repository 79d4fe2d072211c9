"""Mistral."""

from __future__ import annotations

from megatron_hdp.convert.families import rows
from megatron_hdp.convert.families.flags import plain_flags, sizes_of, window_flags
from megatron_hdp.convert.families.table import Family, Layers

MISTRAL = Family(
    name="Mistral",
    architectures=("MistralForCausalLM",),
    sizes=sizes_of,
    flags=lambda config: {**plain_flags(config), **window_flags(config.get("sliding_window"))},
    layers=(Layers((*rows.NORMS, *rows.ATTENTION, *rows.MLP)),),
    expected=rows.NO_BIAS,
)

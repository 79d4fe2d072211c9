"""Llama 2 and 3."""

from __future__ import annotations

from megatron_hdp.convert.families import rows
from megatron_hdp.convert.families.flags import plain_flags, sizes_of
from megatron_hdp.convert.families.table import Family, Layers

_ROTATION = ("model.layers.*.self_attn.rotary_emb.inv_freq",)
"""In old files of Llama: follows from the configuration."""

LLAMA = Family(
    name="Llama 2 and 3",
    architectures=("LlamaForCausalLM",),
    sizes=sizes_of,
    flags=plain_flags,
    layers=(Layers((*rows.NORMS, *rows.ATTENTION, *rows.MLP)),),
    expected=rows.NO_BIAS,
    derived=_ROTATION,
)

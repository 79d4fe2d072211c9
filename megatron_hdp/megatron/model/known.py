"""Subclasses of Megatron's GPT whose own passes are Megatron's over again for what HDP trains.

They write ``forward`` out to change what is around text models: images, other tasks, scalings. Of a
text model Megatron's own passes do the same, so HDP runs those.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.models.gpt import GPTModel

from megatron_hdp.megatron.model.taking import derived, require_own

PASSES = ("forward", "_preprocess", "_postprocess")
"""Methods of a GPT that carry a micro-batch's ring and positions through the model, and its end."""
_MCORE_BRIDGE: Mapping[str, tuple[Any, ...]] = {
    "task_type": ("causal_lm",),
    "is_multimodal": (False,),
    "attention_scaling": (1, None),
    "multi_latent_attention": (False,),
    "position_embedding_type": ("rope", "none"),
    "moe_n_hash_layers": (0, None),
    "ple_layer_ids": (None,),
    "moe_router_enable_vl_bias": (False, None),
    "indexer_n_heads": (None,),
    "mtp_num_layers": (None, 0),
}
_STILL = ("default", "linear", "llama3", None)
"""Kinds of rotary scaling that do not change with the length of a sequence."""
_KNOWN = {"mcore_bridge.model.gpt_model.GPTModel": _MCORE_BRIDGE}
"""By the name of a subclass: settings with which its passes do what Megatron's do (1.6.5)."""


class MegatronsPasses:
    """Megatron's own passes, before a subclass that has others."""


for _name in PASSES:
    setattr(MegatronsPasses, _name, getattr(GPTModel, _name))


def give_megatrons_passes(model: GPTModel) -> None:
    """Lets a model of a known subclass run Megatron's passes; leaves all others as they are.

    Raises:
        ValueError: its settings are others, or a class derived from it has passes of its own.
    """
    for cls in type(model).__mro__:
        name = f"{cls.__module__}.{cls.__qualname__}"
        if name not in _KNOWN:
            continue
        require_own(model, cls, PASSES)
        for setting, wanted in _KNOWN[name].items():
            found = getattr(model.config, setting, wanted[0])
            if found not in wanted:
                raise ValueError(
                    f"{name}: found {setting} = {found}, expected {wanted[0]}: HDP trains its text "
                    "models of standard attention; set it, or build another model"
                )
        scaling = getattr(model, "hf_rope_scaling", None) or {}
        if scaling.get("rope_type") not in _STILL:
            raise ValueError(
                f"{name}: found rotary scaling {scaling['rope_type']}, expected one that does not "
                "change with the length of a sequence: default, linear or llama3"
            )
        found = type(model)
        model.__class__ = derived(found.__name__, (MegatronsPasses, found))
        return

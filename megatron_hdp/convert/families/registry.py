"""The families of models that can be converted: what their configurations and tensors mean."""

from __future__ import annotations

from typing import Any

from megatron_hdp.convert.families import rows
from megatron_hdp.convert.families.flags import plain_flags, sizes_of, window_flags
from megatron_hdp.convert.families.latent import DEEPSEEK
from megatron_hdp.convert.families.sparse import GLM, GPT_OSS, MIXTRAL, QWEN3_MOE
from megatron_hdp.convert.families.table import Config, Family, Layers

_ROTATION = ("model.layers.*.self_attn.rotary_emb.inv_freq",)
"""In old files of Llama: follows from the configuration."""


def _plain(**more: Any) -> Any:
    """Flags of a dense model, and some more."""
    return lambda config: {**plain_flags(config), **more}


def _mistral_flags(config: Config) -> dict[str, Any]:
    return {**plain_flags(config), **window_flags(config.get("sliding_window"))}


FAMILIES = (
    Family(
        name="Llama 2 and 3",
        architectures=("LlamaForCausalLM",),
        sizes=sizes_of,
        flags=_plain(),
        outer=rows.OUTER,
        layers=(Layers((*rows.NORMS, *rows.ATTENTION, *rows.MLP)),),
        expected=rows.NO_BIAS,
        derived=_ROTATION,
    ),
    Family(
        name="Mistral",
        architectures=("MistralForCausalLM",),
        sizes=sizes_of,
        flags=_mistral_flags,
        outer=rows.OUTER,
        layers=(Layers((*rows.NORMS, *rows.ATTENTION, *rows.MLP)),),
        expected=rows.NO_BIAS,
    ),
    Family(
        name="Qwen2.5",
        architectures=("Qwen2ForCausalLM",),
        sizes=sizes_of,
        flags=_plain(add_qkv_bias=True),
        outer=rows.OUTER,
        layers=(Layers((*rows.NORMS, *rows.ATTENTION, *rows.QKV_BIAS, *rows.MLP)),),
        expected={**rows.NO_BIAS, **rows.WINDOW_OFF},
    ),
    Family(
        name="Qwen3",
        architectures=("Qwen3ForCausalLM",),
        sizes=sizes_of,
        flags=_plain(qk_layernorm=True),
        outer=rows.OUTER,
        layers=(Layers((*rows.NORMS, *rows.ATTENTION, *rows.QK_NORMS, *rows.MLP)),),
        expected={**rows.NO_BIAS, **rows.WINDOW_OFF},
    ),
    MIXTRAL,
    QWEN3_MOE,
    GLM,
    GPT_OSS,
    DEEPSEEK,
)


def family_of(config: Config, where: str) -> Family:
    """The family of a configuration.

    Args:
        config: of the model.
        where: it was found, for messages.

    Raises:
        ValueError: there is none, or its table does not say what the configuration wants.
    """
    found = (config.get("architectures") or [config.get("model_type")])[0]
    family = next((one for one in FAMILIES if found in one.architectures), None)
    if family is None:
        known = [name for one in FAMILIES for name in one.architectures]
        raise ValueError(
            f"{where}: found the architecture {found}, expected one of {', '.join(known)}: others "
            "need a table of their own (megatron_hdp/convert/families)"
        )
    for key, allowed in family.expected.items():
        if key in config and config[key] not in allowed:
            raise ValueError(
                f"{where}: found {key} {config[key]} in a model of {family.name}, expected "
                f"{' or '.join(map(str, allowed))}: what training knows of it has nothing else"
            )
    return family

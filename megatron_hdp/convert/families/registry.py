"""The families of models that can be converted: what their configurations and tensors mean."""

from __future__ import annotations

from typing import Any

from megatron_hdp.convert.families.checks import check_config, check_flags
from megatron_hdp.convert.families.deepseek import DEEPSEEK
from megatron_hdp.convert.families.glm import GLM
from megatron_hdp.convert.families.gpt_oss import GPT_OSS
from megatron_hdp.convert.families.llama import LLAMA
from megatron_hdp.convert.families.mistral import MISTRAL
from megatron_hdp.convert.families.mixtral import MIXTRAL
from megatron_hdp.convert.families.qwen import QWEN2, QWEN3, QWEN3_MOE, QWEN3_VL_MOE
from megatron_hdp.convert.families.table import Config, Family

FAMILIES = (LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL, QWEN3_MOE, QWEN3_VL_MOE, GLM, GPT_OSS, DEEPSEEK)


def family_of(config: Config, where: str) -> Family:
    """The family of a configuration; messages say ``where`` it was found.

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
                f"{' or '.join(map(str, allowed))}: nothing else is supported in this family"
            )
    return family


def flags_of(family: Family, config: Config, where: str) -> dict[str, Any]:
    """The flags of a configuration; messages say ``where`` it was found.

    Raises:
        ValueError: it lacks something, or holds what is no model's.
    """
    try:
        check_config(config)
        flags = family.flags(config)
        check_flags(flags)
    except KeyError as error:
        raise ValueError(f"{where}: found no {error}, expected it") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return flags

"""A model's config.json as Megatron's flags, and what training has changed of them written back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_hdp.convert import rope
from megatron_hdp.convert.table import Config

NAMES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "max_position_embeddings": "max_position_embeddings",
    "norm_epsilon": "rms_norm_eps",
}
"""Flags that are numbers of the configuration, under another name."""

_ALWAYS = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
_TYPES = {"bfloat16": True, "float16": True, "float32": False, "float64": False}


def sizes_of(config: Config) -> dict[str, int]:
    """What tables of models with grouped queries and a gated MLP speak of."""
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    head = config.get("head_dim") or config["hidden_size"] // heads
    return {
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "ffn": config["intermediate_size"],
        "vocabulary": config["vocab_size"],
        "groups": groups,
        "head": head,
        "query": heads * head,
        "key": groups * head,
        "experts": 0,
    }


def plain_flags(config: Config) -> dict[str, Any]:
    """The flags of models with grouped queries and a gated MLP."""
    sizes = sizes_of(config)
    return {
        **{flag: config[name] for flag, name in NAMES.items()},
        **_ALWAYS,
        "group_query_attention": True,
        "num_query_groups": sizes["groups"],
        "kv_channels": sizes["head"],
        **rope.rope_flags(config),
        "untie_embeddings_and_output_weights": not is_tied(config),
        "init_method_std": config.get("initializer_range", 0.02),
        "make_vocab_size_divisible_by": config["vocab_size"],
        "bf16": is_16_bit(config),
    }


def is_tied(config: Config) -> bool:
    """Whether the output layer has the embedding's weights."""
    return bool(config.get("tie_word_embeddings", False))


def is_16_bit(config: Config) -> bool:
    """Whether the weights are trained in bfloat16."""
    return _TYPES.get(str(config.get("dtype") or config.get("torch_dtype")), True)


def update(config: Config, flags: Mapping[str, Any], trained: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with what training has changed.

    Args:
        config: that the weights came from.
        flags: its flags.
        trained: the flags of the run that saved the weights; those that it does not name are kept.

    Raises:
        ValueError: the run trained another model.
    """
    updated = dict(config)
    if "rope_parameters" in updated and updated["rope_parameters"]:
        updated["rope_parameters"] = dict(updated["rope_parameters"])
    for flag in ("max_position_embeddings", "rotary_base", "norm_epsilon"):
        if flag in flags and trained.get(flag, flags[flag]) != flags[flag]:
            if flag == "rotary_base":
                rope.set_base(updated, trained[flag])
            else:
                updated[NAMES[flag]] = trained[flag]
    before, after = _scaling(flags), _scaling({**flags, **trained})
    if before != after:
        rope.set_llama3(updated, after)
    for flag in _DECIDE:
        if flag in flags and flag in trained and flags[flag] != trained[flag]:
            raise ValueError(
                f"the checkpoint is of another model: found --{flag.replace('_', '-')} "
                f"{trained[flag]}, expected {flags[flag]} as in config.json: give --like with the "
                "folder of the model that it was trained from"
            )
    return updated


_DECIDE = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
    *("kv_channels", "qk_layernorm", "add_qkv_bias", "untie_embeddings_and_output_weights"),
    *("swiglu", "normalization", "num_experts", "moe_ffn_hidden_size", "moe_router_topk"),
    *("moe_router_pre_softmax", "position_embedding_type", "rotary_percent"),
)
"""Flags without which it is another model, so that nothing could be written back of them."""


def _scaling(flags: Mapping[str, Any]) -> float | None:
    return flags.get("rope_scaling_factor") if flags.get("use_rope_scaling") else None


def as_yaml(flags: Mapping[str, Any], about: str) -> str:
    """The flags as a file for ``--config``.

    Args:
        flags: by their names in Megatron, with underscores.
        about: a comment.
    """
    lines = [f"# {about}", "", "model:"]
    for flag, value in flags.items():
        name = flag.replace("_", "-")
        if flag == "add_bias_linear":  # the switch says the opposite
            name, value = "disable-bias-linear", not value
        lines.append(f"  {name}: {_as_text(value)}")
    return "\n".join(lines) + "\n"


def _as_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, (int, float)) else f'"{value}"'

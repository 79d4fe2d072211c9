"""A model's config.json as Megatron's flags, and what training has changed of them written back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from megatron_hdp.convert.families import rope
from megatron_hdp.convert.families.table import Config, is_tied
from megatron_hdp.megatron.options import TrainingArguments

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
        "vocab_size": config["vocab_size"],
        "make_vocab_size_divisible_by": 1,
        "bf16": _TYPES.get(str(config.get("dtype") or config.get("torch_dtype")), True),
    }


def window_flags(window: int | None, layers: list[bool] | None = None) -> dict[str, Any]:
    """The flags of attention with a window.

    Args:
        window: tokens that a query sees, itself included; None for all before it.
        layers: of each layer, whether it has the window; all if not given.
    """
    if window is None or (layers is not None and not any(layers)):
        return {}
    found = {"window_size": f"{window - 1},0"}
    if layers is not None and not all(layers):
        found["window_attn_skip_freq"] = str([int(one) for one in layers]).replace(" ", "")
    return found


def update(config: Config, flags: Mapping[str, Any], trained: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with what training has changed.

    The flags are the configuration's, and those of the run that saved the weights; those that the
    run does not name are kept.

    Raises:
        ValueError: the run trained another model.
    """
    updated = dict(config)
    for flag in WRITTEN_BACK[:2]:
        if trained.get(flag, flags[flag]) != flags[flag]:
            updated[NAMES[flag]] = trained[flag]
    now = {**flags, **{flag: trained[flag] for flag in rope.FLAGS if flag in trained}}
    if any(now[flag] != flags.get(flag, _UNUSED.get(flag)) for flag in rope.FLAGS if flag in now):
        rope.set_rope(updated, now)
    for flag in sorted(flags.keys() - {*WRITTEN_BACK, *FREE}):
        if trained.get(flag, flags[flag]) != flags[flag]:
            raise ValueError(
                f"the checkpoint is of another model: found --{flag.replace('_', '-')} "
                f"{trained[flag]}, expected {flags[flag]} as in config.json: give --like with the "
                "folder of the model that it was trained from"
            )
    return updated


_UNUSED = {item.name: item.default for item in fields(TrainingArguments)}
"""What a run says of flags that it does not use."""
WRITTEN_BACK = ("max_position_embeddings", "norm_epsilon", *rope.FLAGS)
"""Flags that a run may change: its values stand in the configuration that it gives."""
FREE = {
    *("attention_dropout", "hidden_dropout", "init_method_std", "bf16", "group_query_attention"),
    *("vocab_size", "make_vocab_size_divisible_by", "moe_router_load_balancing_type"),
    *("moe_aux_loss_coeff", "moe_token_dispatcher_type", "moe_router_dtype"),
}
"""Flags of how a model is trained: a run may change them, and no configuration says so.

Every other flag that a family gives decides which model it is: with another value nothing could be
written back.
"""


def as_yaml(flags: Mapping[str, Any], about: str) -> str:
    """The flags, by their names with underscores, as a file for ``--config`` with a comment."""
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

"""Rotary positions of a config.json, in its old words and its new ones, as Megatron's flags.

Old: ``rope_theta`` and ``rope_scaling`` (with ``type`` or ``rope_type``); new, from transformers 5
on: both in ``rope_parameters``. What is written back is written in the words that were there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_DEFAULT_BASE = 10000.0
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""What Megatron's ``--use-rope-scaling`` has built in."""
FLAGS = (
    *(
        "position_embedding_type",
        "rope_type",
        "rotary_base",
        "use_rope_scaling",
        "rope_scaling_factor",
    ),
    *("rotary_scaling_factor", "yarn_original_max_position_embeddings", "yarn_beta_fast"),
    *("yarn_beta_slow", "yarn_correction_range_round_to_int", "mscale", "mscale_all_dim"),
)
"""Those of positions that training may change, so that they are written back."""


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Base and scaling in the new words."""
    if parameters := config.get("rope_parameters"):
        return {"rope_type": "default", "rope_theta": _DEFAULT_BASE, **parameters}
    scaling = dict(config.get("rope_scaling") or {})
    kind = scaling.pop("type", None)
    scaling.setdefault("rope_type", kind or "default")
    return {**scaling, "rope_theta": config.get("rope_theta", _DEFAULT_BASE)}


def rope_flags(config: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of a configuration.

    Raises:
        ValueError: a scaling that Megatron does not know, or a base that is no whole number.
    """
    rope = rope_of(config)
    base, kind = rope["rope_theta"], rope["rope_type"]
    if int(base) != base:
        raise ValueError(f"rope_theta: found {base}, expected a whole number, as --rotary-base is")
    flags = {"position_embedding_type": "rope", "rotary_base": int(base)}
    if kind == "default":
        return flags
    if kind == "llama3":
        _require(rope, _LLAMA3)
        return {**flags, "use_rope_scaling": True, "rope_scaling_factor": float(rope["factor"])}
    if kind == "yarn":
        return {**flags, "position_embedding_type": "yarn", **_yarn_flags(rope, config)}
    raise ValueError(f"rope_type: found {kind}, expected default, llama3 or yarn")


def _require(rope: Mapping[str, Any], built_in: Mapping[str, Any]) -> None:
    for key, expected in built_in.items():
        if rope.get(key) != expected:
            raise ValueError(
                f"rope scaling: found {key} {rope.get(key)}, expected {expected}, which Megatron's "
                "--use-rope-scaling has built in"
            )


def _yarn_flags(rope: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    if rope.get("attention_factor") is not None:
        raise ValueError(
            f"rope scaling: found attention_factor {rope['attention_factor']}, expected none, or "
            "mscale and mscale_all_dim, which Megatron has"
        )
    original = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
    mscale, of_all = rope.get("mscale"), rope.get("mscale_all_dim")
    return {
        "rotary_scaling_factor": float(rope["factor"]),
        "yarn_original_max_position_embeddings": original,
        "yarn_beta_fast": float(rope.get("beta_fast") or 32.0),
        "yarn_beta_slow": float(rope.get("beta_slow") or 1.0),
        "yarn_correction_range_round_to_int": bool(rope.get("truncate", True)),
        # without both of them transformers takes what follows from the factor
        "mscale": float(mscale) if mscale and of_all else 1.0,
        "mscale_all_dim": float(of_all) if mscale and of_all else 0.0,
    }


def set_rope(config: dict[str, Any], flags: Mapping[str, Any]) -> None:
    """Writes base and scaling of `flags` where those of a configuration stand; changes it."""
    scaling: dict[str, Any] = {"rope_type": "default"}
    if flags.get("use_rope_scaling"):
        scaling = {"rope_type": "llama3", "factor": flags["rope_scaling_factor"], **_LLAMA3}
    elif "yarn" in (flags["position_embedding_type"], flags.get("rope_type")):
        scaling = {
            "rope_type": "yarn",
            "factor": flags["rotary_scaling_factor"],
            "original_max_position_embeddings": flags["yarn_original_max_position_embeddings"],
            "beta_fast": flags["yarn_beta_fast"],
            "beta_slow": flags["yarn_beta_slow"],
            "truncate": flags["yarn_correction_range_round_to_int"],
        }
        if flags["mscale_all_dim"]:
            scaling |= {name: flags[name] for name in ("mscale", "mscale_all_dim")}
    base = float(flags["rotary_base"])
    if before := config.get("rope_parameters"):
        kept = {key: before[key] for key in before if key == "partial_rotary_factor"}
        config["rope_parameters"] = {**kept, **scaling, "rope_theta": base}
    else:
        config["rope_theta"] = base
        config["rope_scaling"] = None if scaling["rope_type"] == "default" else scaling

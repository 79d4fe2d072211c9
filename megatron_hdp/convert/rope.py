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
    raise ValueError(f"rope_type: found {kind}, expected default or llama3")


def _require(rope: Mapping[str, Any], built_in: Mapping[str, Any]) -> None:
    for key, expected in built_in.items():
        if rope.get(key) != expected:
            raise ValueError(
                f"rope scaling: found {key} {rope.get(key)}, expected {expected}, which Megatron's "
                "--use-rope-scaling has built in"
            )


def set_base(config: dict[str, Any], base: float) -> None:
    """Writes another base where the old one stands."""
    place = config["rope_parameters"] if config.get("rope_parameters") else config
    place["rope_theta"] = float(base)


def set_llama3(config: dict[str, Any], factor: float | None) -> None:
    """Writes the scaling of Llama 3, or none.

    Args:
        config: changed in place.
        factor: of the scaling; None for none.
    """
    base = rope_of(config)["rope_theta"]
    scaling = {"rope_type": "llama3", "factor": factor, **_LLAMA3} if factor else None
    if config.get("rope_parameters"):
        config["rope_parameters"] = {**(scaling or {"rope_type": "default"}), "rope_theta": base}
    else:
        config["rope_scaling"] = scaling

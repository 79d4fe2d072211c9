"""Adapters and an encoder by their names, and what a checkpoint says of adapters that it holds."""

from __future__ import annotations

from typing import Any

NAMES = ("lora_a", "lora_b")
ENCODER = "hdp_encoder"
"""How names of an encoder's weights begin: the attribute of the model's first chunk."""
_FLAGS = {"rank": "--lora-rank", "alpha": "--lora-alpha", "targets": "--lora-targets"}


def is_adapter(name: str) -> bool:
    """Whether a name of a parameter, or a key of a checkpoint, is an adapter's."""
    return name.rpartition(".")[-1] in NAMES


def is_of_encoder(name: str) -> bool:
    """Whether a name of a parameter, in its part of the model, is an encoder's."""
    return name.split(".", 1)[0] == ENCODER


def adapter_record(arguments: Any) -> dict[str, Any] | None:
    """What checkpoints say of a run's adapters, by its arguments; None of one without any."""
    if arguments.lora_rank is None:
        return None
    alpha = arguments.lora_rank if arguments.lora_alpha is None else arguments.lora_alpha
    targets = sorted(arguments.lora_targets)
    return {"rank": arguments.lora_rank, "alpha": float(alpha), "targets": targets}


def require_same_adapters(
    mine: dict[str, Any] | None, saved: dict[str, Any] | None, source: object
) -> None:
    """Refuses a checkpoint of other adapters than this run's.

    Raises:
        ValueError: says what was found and expected, and which flags to give.
    """
    if mine == saved:
        return
    if saved is None:
        raise ValueError(
            f"{source} holds the weights of a whole model, expected adapters (--lora-rank): give "
            "it as --pretrained-checkpoint, and a folder of its own to --load"
        )
    told = " ".join(f"{flag} {_words(saved[name])}" for name, flag in _FLAGS.items())
    if mine is None:
        raise ValueError(
            f"{source} holds adapters alone, expected the weights of a whole model: add {told}, "
            "and the model that they were trained beside as --pretrained-checkpoint"
        )
    differing = [name for name in _FLAGS if mine[name] != saved[name]]
    found = ", ".join(f"{_FLAGS[name]} {_words(mine[name])}" for name in differing)
    raise ValueError(
        f"{source} holds other adapters: found {found}, expected {told}: give the flags they were "
        "saved with"
    )


def _words(value: Any) -> str:
    return " ".join(value) if isinstance(value, list) else f"{value:g}"

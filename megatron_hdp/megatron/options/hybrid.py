"""A hybrid that Megatron has built: each layer attends, or is an MLP or a mixture of experts.

Megatron's pattern has a letter for each layer, ``|`` between pipeline stages and ``/`` before what
each depth of multi-token prediction holds: ``*-*-|*E*-``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_hdp.megatron.options.arguments import TrainingArguments
from megatron_hdp.options import OptionError

ATTENDING, DENSE, EXPERTS = "*+", "-", "E"
_STAGE, _DEPTH = "|", "/"
_OVER_TOKENS = "runs over all packed tokens of a rank, across sequences and not around rings"
_REFUSED = {
    "M": f"the state and the convolution of a Mamba block {_OVER_TOKENS}",
    "G": f"the state and the convolution of a gated delta net {_OVER_TOKENS}",
    "D": "sparse attention chooses among the keys that a rank has, not among those of a ring",
}


@dataclass(frozen=True, kw_only=True)
class HybridArguments(TrainingArguments):
    """A run of such a model; no command of ours builds one, so the pattern is no flag."""

    hybrid_layer_pattern: str


def require_known_letters(
    pattern: str, whose: str = "--hybrid-layer-pattern", what: str = ""
) -> None:
    """Refuses a pattern with blocks whose tokens HDP cannot place.

    Args:
        pattern: of a model, or one letter of it.
        whose: where it was found.
        what: is the block, in the error.

    Raises:
        OptionError: names the letter and the reason.
    """
    for letter in pattern:
        if letter in _REFUSED:
            raise OptionError(
                f"{whose}: found {letter}{what}, expected *, +, - or E: {_REFUSED[letter]}; train "
                "a pattern without it"
            )


def options_of_pattern(pattern: str) -> dict[str, Any]:
    """What a pattern says in the words of other options."""
    parts = pattern.split(_DEPTH)[0].split(_STAGE)
    letters = "".join(parts)
    found: dict[str, Any] = {"hybrid_layer_pattern": pattern, "num_layers": len(letters)}
    if EXPERTS in letters:
        found["moe_layer_freq"] = str([int(letter == EXPERTS) for letter in letters])
    if len(parts) > 1:
        found["pipeline_model_parallel_layout"] = f"E{'|'.join('t' * len(one) for one in parts)}L"
    return found


def blocks_of(arguments: TrainingArguments) -> tuple[str, ...] | None:
    """The letter of each layer; None of a GPT, whose layers are attention and MLP."""
    if not isinstance(arguments, HybridArguments):
        return None
    letters = arguments.hybrid_layer_pattern.split(_DEPTH)[0].replace(_STAGE, "")
    return tuple(letters)


def block_behind(arguments: TrainingArguments) -> str:
    """The letters of each depth of multi-token prediction; those of a layer of a GPT."""
    if not isinstance(arguments, HybridArguments):
        return ATTENDING + DENSE
    return (arguments.hybrid_layer_pattern.split(_DEPTH) + [""])[1]

"""Which layers see the last tokens only, and how many: ``--window-size``, read as Megatron does."""

from __future__ import annotations

import re
from typing import Any

from megatron_hdp.megatron.options.arguments import TrainingArguments
from megatron_hdp.megatron.options.patterns import pattern_of, zeros_and_ones
from megatron_hdp.options import OptionError, no_effect

_SIZE = re.compile(r"\(?\s*(\d{1,9})\s*,\s*0\s*\)?")


def check_windows(args: TrainingArguments) -> None:
    """Checks these options together, derived defaults filled in.

    Raises:
        OptionError: says what was found, what was expected and the remedy.
    """
    layer_windows(args)
    if args.window_size is not None and args.multi_latent_attention:
        raise OptionError(
            "--window-size does not work with --multi-latent-attention, whose keys and values "
            "differ in size: remove one of them"
        )


def layer_windows(args: TrainingArguments) -> tuple[int | None, ...]:
    """Tokens that a query of each layer sees, itself included; None where it sees all before it.

    Raises:
        OptionError: the flags do not say so.
    """
    layers = args.num_layers or 1
    frequency = _frequency(args)
    if args.window_size is None:
        return (None,) * layers
    window = _window(args.window_size)
    if frequency is None:
        return (window,) * layers
    if isinstance(frequency, int):
        frequency = tuple(int(number % frequency != 0) for number in range(1, layers + 1))
    return tuple(window if has_one else None for has_one in frequency)


def window_settings(args: TrainingArguments) -> dict[str, Any]:
    """What ``TransformerConfig`` needs to know of windows; nothing where there are none."""
    if args.window_size is None:
        return {}
    frequency = _frequency(args)
    return {
        "window_size": (_window(args.window_size) - 1, 0),
        "window_attn_skip_freq": list(frequency) if isinstance(frequency, tuple) else frequency,
    }


def _window(text: str) -> int:
    """Tokens that a query sees, itself included."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise OptionError(
            f"--window-size: found {text!r}, expected N,0: a query sees N tokens before itself, "
            "and none after, as attention is causal"
        )
    return int(found[1]) + 1


def _frequency(args: TrainingArguments) -> int | tuple[int, ...] | None:
    """Every how many layers one has no window; or 1 for each layer that has one, 0 for others."""
    flag, text = "--window-attn-skip-freq", args.window_attn_skip_freq
    if text is None:
        return None
    if args.window_size is None:
        raise no_effect(flag, "--window-size")
    pattern = pattern_of(flag, text)
    if isinstance(pattern, tuple):
        return zeros_and_ones(flag, pattern, args.num_layers or 1)
    if pattern < 1:
        raise OptionError(f"{flag}: found {pattern}, expected at least 1, or a list of 0 and 1")
    return pattern

"""Layers that hold experts, and layers with a window, as Megatron's flags write them.

A flag gives a period, or a list of 0 and 1 that may be written with ``+`` and ``*``:
``([0]*3+[1])*2`` is ``[0, 0, 0, 1, 0, 0, 0, 1]``. One that does not fit is an `OptionError`.
"""

from __future__ import annotations

import ast
import re
from typing import Any

from megatron_hdp.megatron.options.arguments import TrainingArguments, stage_split
from megatron_hdp.options import OptionError, no_effect

_EXPERTS, _WINDOWS = "--moe-layer-freq", "--window-attn-skip-freq"
_SIZE = re.compile(r"\(?\s*(\d{1,9})\s*,\s*0\s*\)?")
_MOST_LAYERS = 10_000


def pattern_of(flag: str, text: str) -> int | tuple[int, ...]:
    """The number or the list of numbers that `text` writes."""
    try:
        found = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        found = None
    if found is None:
        raise OptionError(
            f"{flag}: found {text!r}, expected a number, or a list like [0,0,1] or ([0]*3+[1])*2"
        )
    return tuple(found) if isinstance(found, list) else found


def _value(node: ast.expr) -> int | list[int] | None:
    """A number, or a list by ``[...]``, ``+`` and ``*``; None for all else."""
    if isinstance(node, ast.Constant):
        return node.value if type(node.value) is int else None
    if isinstance(node, ast.List):
        numbers = [one for item in node.elts if type(one := _value(item)) is int]
        return numbers if len(numbers) == len(node.elts) else None
    if not isinstance(node, ast.BinOp):
        return None
    left, right = _value(node.left), _value(node.right)
    if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
        found = left + right
    elif isinstance(node.op, ast.Mult) and isinstance(left, list) and type(right) is int:
        found = left * min(right, _MOST_LAYERS + 1)
    elif isinstance(node.op, ast.Mult) and isinstance(right, list) and type(left) is int:
        found = right * min(left, _MOST_LAYERS + 1)
    else:
        return None
    return found if len(found) <= _MOST_LAYERS else None


def zeros_and_ones(flag: str, pattern: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """The pattern, checked: 0 or 1 for every layer."""
    if len(pattern) != num_layers or set(pattern) - {0, 1}:
        raise OptionError(
            f"{flag}: found {list(pattern)}, expected {num_layers} numbers that are 0 or 1, one "
            "for each of --num-layers"
        )
    return pattern


def expert_layers(args: TrainingArguments) -> tuple[bool, ...]:
    """Of each layer in the model's order, whether it holds experts."""
    number = args.num_layers or 1
    if args.num_experts is None:
        return (False,) * number
    found = layer_frequency(args.moe_layer_freq)
    if isinstance(found, int):
        return tuple(layer % found == 0 for layer in range(number))
    return tuple(one == 1 for one in zeros_and_ones(_EXPERTS, tuple(found), number))


def expert_layers_of_chunk(args: TrainingArguments, stage: int, chunk: int) -> tuple[bool, ...]:
    """The same of the layers of one model chunk of a pipeline stage."""
    split = stage_split(args)
    place = chunk * split.num_stages + stage
    first = sum(split.layers[:place])
    return expert_layers(args)[first : first + split.layers[place]]


def layer_frequency(text: str) -> int | list[int]:
    """What Megatron's ``moe_layer_freq`` is for the flag's text."""
    found = _pattern_or_period(_EXPERTS, text)
    return found if isinstance(found, int) else list(found)


def _pattern_or_period(flag: str, text: str) -> int | tuple[int, ...]:
    found = pattern_of(flag, text)
    if isinstance(found, int) and found < 1:
        raise OptionError(f"{flag}: found {found}, expected at least 1, or a list of 0 and 1")
    return found


def check_windows(args: TrainingArguments) -> None:
    """Checks these options together, derived defaults filled in."""
    layer_windows(args)
    if args.window_size is not None and args.multi_latent_attention:
        raise OptionError(
            "--window-size does not work with --multi-latent-attention, whose keys and values "
            "differ in size: remove one of them"
        )


def layer_windows(args: TrainingArguments) -> tuple[int | None, ...]:
    """Tokens that a query of each layer sees, itself included; None where it sees all before it."""
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
    flag, text = _WINDOWS, args.window_attn_skip_freq
    if text is None:
        return None
    if args.window_size is None:
        raise no_effect(flag, "--window-size")
    pattern = _pattern_or_period(flag, text)
    if isinstance(pattern, int):
        return pattern
    return zeros_and_ones(flag, pattern, args.num_layers or 1)

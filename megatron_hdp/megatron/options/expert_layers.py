"""Which layers hold experts, as ``--moe-layer-freq`` says it; the others hold one plain MLP."""

from __future__ import annotations

import ast
from typing import Any

from megatron_hdp.megatron.options.arguments import TrainingArguments, stage_split
from megatron_hdp.options import OptionError

_LONGEST = 10_000  # layers of a pattern, and characters that say it


def expert_layers(args: TrainingArguments) -> tuple[bool, ...]:
    """Of each layer in the model's order, whether it holds experts.

    Raises:
        OptionError: ``--moe-layer-freq`` does not describe the model's layers.
    """
    number = args.num_layers or 1
    if args.num_experts is None:
        return (False,) * number
    found = layer_frequency(args.moe_layer_freq)
    if isinstance(found, int):
        return tuple(layer % found == 0 for layer in range(number))
    if len(found) != number:
        raise OptionError(
            f"--moe-layer-freq {args.moe_layer_freq}: found {len(found)} layers, expected "
            f"--num-layers {number}: change one of them"
        )
    return tuple(one == 1 for one in found)


def expert_layers_of_chunk(args: TrainingArguments, stage: int, chunk: int) -> tuple[bool, ...]:
    """The same of the layers of one model chunk of a pipeline stage."""
    split = stage_split(args)
    place = chunk * split.num_stages + stage
    first = sum(split.layers[:place])
    return expert_layers(args)[first : first + split.layers[place]]


def layer_frequency(text: str) -> int | list[int]:
    """What Megatron's ``moe_layer_freq`` is for the flag's text.

    Args:
        text: a number, or a Python expression of lists of 0 and 1 with ``+`` and ``*``.

    Raises:
        OptionError: it is neither.
    """
    try:
        found = _value(ast.parse(text.strip()[:_LONGEST], mode="eval").body)
    except (ValueError, TypeError, SyntaxError, RecursionError):
        found = 0
    if isinstance(found, int) and found >= 1:
        return found
    if isinstance(found, list) and found and set(found) <= {0, 1}:
        return found
    raise OptionError(
        f"--moe-layer-freq: found {text[:80]!r}, expected a number of at least 1, or lists of 0 "
        "and 1 with + and *, such as '[0]*3+[1]*58'"
    )


def _value(node: ast.expr) -> Any:
    """Of an expression that only adds and multiplies whole numbers and lists.

    Raises:
        ValueError: it does anything else, or is too long.
        TypeError: it adds or multiplies what does not go together.
    """
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.List(elts=parts):
            return [_value(part) for part in parts]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _value(left) + _value(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            factors = [_value(left), _value(right)]
            sizes = [len(one) if isinstance(one, list) else one for one in factors]
            if sizes[0] * sizes[1] <= _LONGEST:
                return factors[0] * factors[1]
    raise ValueError("not a pattern of layers")

"""Which layers something holds for, as Megatron's flags write it: a period, or a list of 0 and 1.

A list may be written with ``+`` and ``*``: ``([0]*3+[1])*2`` is ``[0, 0, 0, 1, 0, 0, 0, 1]``.
"""

from __future__ import annotations

import ast

from megatron_hdp.options import OptionError

_MOST_LAYERS = 10_000


def pattern_of(flag: str, text: str) -> int | tuple[int, ...]:
    """The number or the list of numbers that `text` writes.

    Raises:
        OptionError: it is neither.
    """
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
        numbers = [_value(item) for item in node.elts]
        return [item for item in numbers if type(item) is int] if _are_numbers(numbers) else None
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


def _are_numbers(found: list[int | list[int] | None]) -> bool:
    return all(type(item) is int for item in found)


def zeros_and_ones(flag: str, pattern: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """The pattern, checked: 0 or 1 for every layer.

    Raises:
        OptionError: it has another length, or other numbers.
    """
    if len(pattern) != num_layers or set(pattern) - {0, 1}:
        raise OptionError(
            f"{flag}: found {list(pattern)}, expected {num_layers} numbers that are 0 or 1, one "
            "for each of --num-layers"
        )
    return pattern

"""Layouts of a pipeline: text that names the parts of the model one after the other.

The grammar is that of Megatron's ``--pipeline-model-parallel-layout``: ``E`` is the embedding,
``t`` a layer, ``L`` output layer and loss; ``|`` ends a part, ``*n`` repeats the letter, the bar or
the brackets before it, and commas are for the eye. ``Et|(tt|)*2,L`` has four parts, the second and
third with two layers each.
"""

import re

from megatron_hdp.options import OptionError

_FLAG = "--pipeline-model-parallel-layout"
_MOST_LETTERS = 100_000
_BRACKETS = re.compile(r"\(([^()]+)\)\*([0-9]+)")
_LETTER = re.compile(r"([^()*])\*([0-9]+)")
_LETTERS = "EtL"


def parts_of(layout: str) -> tuple[int, ...]:
    """Layers of each part that a layout names, in the model's order.

    Raises:
        OptionError: it is none, or the embedding does not stand in front, the loss at the end.
    """
    letters = _written_out(layout)
    strange = next((letter for letter in letters if letter not in _LETTERS + "|"), None)
    if strange == "m":
        raise OptionError(
            f"{_FLAG} {layout}: found m, multi-token prediction, which HDP does not know; expected "
            "E (embedding), t (a layer) and L (loss): leave it out"
        )
    if strange is not None:
        raise OptionError(
            f"{_FLAG} {layout}: found {strange!r}, expected E (embedding), t (a layer), L (loss), "
            "| between parts, and *n behind one of them or behind brackets that hold no others: "
            "like Ett|(ttt|)*2,ttL"
        )
    parts = letters.split("|")
    if "E" not in parts[0] or "L" not in parts[-1] or not _is_framed(letters.replace("|", "")):
        raise OptionError(
            f"{_FLAG} {layout}: expected one E, first in the first part, and one L, last in the "
            f"last part, where Megatron computes them; found {', '.join(_shown(parts))}: move them"
        )
    return tuple(part.count("t") for part in parts)


def _is_framed(letters: str) -> bool:
    """Whether the model's letters begin with the only ``E`` and end with the only ``L``."""
    return letters[0] == "E" and letters[-1] == "L" and not set(letters[1:-1]) & {"E", "L"}


def _shown(parts: list[str]) -> list[str]:
    """The first parts and the last, each as it is written out."""
    named = [part or "(empty)" for part in parts]
    return named if len(named) <= 4 else [*named[:2], "...", named[-1]]


def _written_out(layout: str) -> str:
    """The layout without repetitions."""
    letters = layout.replace(",", "")
    for pattern in (_BRACKETS, _LETTER):
        size = sum(len(found[1]) * _count(found[2]) for found in pattern.finditer(letters))
        if size > _MOST_LETTERS:
            raise OptionError(
                f"{_FLAG} {layout[:80]}: found repetitions of {size:,} letters, expected at most "
                f"{_MOST_LETTERS:,}: repeat less"
            )
        letters = pattern.sub(lambda found: found[1] * int(found[2]), letters)
    return letters


def _count(digits: str) -> int:
    """A number of any length, far above what is allowed where it is long."""
    return int(digits) if len(digits) < 12 else 10**12

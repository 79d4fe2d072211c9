"""Speeds of ranks that a user knows: one a line."""

import math
from collections.abc import Iterable

SLOWEST, FASTEST = 1e-6, 1e6
"""A rank that is further from the cost model than this is none that trains."""


def is_speed(speed: float) -> bool:
    """Return whether a rank may be so fast, 1 being a rank as the cost model describes it."""
    return SLOWEST <= speed <= FASTEST


def speeds_in(
    lines: Iterable[tuple[int, str]], path: object, num_ranks: int, ranks: str
) -> tuple[float, ...]:
    """The speed of each rank; 1 is a rank as the cost model describes it.

    Args:
        lines: of the file that say something, with their numbers.
        path: of the file.
        num_ranks: ranks.
        ranks: these in words.

    Raises:
        ValueError: a line is no positive number (named), or there is not one line a rank.
    """
    speeds = [_speed(text, f"{path}, line {number}") for number, text in lines]
    if len(speeds) != num_ranks:
        raise ValueError(
            f"{path} has {len(speeds):,} speeds, expected one a line for each of {ranks}"
        )
    return tuple(speeds)


def _speed(text: str, where: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        speed = math.nan
    if not is_speed(speed):
        raise ValueError(
            f"{where}: found {text[:60]!r}, expected the speed of one rank, a number from "
            f"{SLOWEST:g} to {FASTEST:g} (1 for a rank of full speed)"
        )
    return speed

"""Numbers that a user gives: whole ones by flags, and files with one a line."""

import argparse
import math
from collections.abc import Callable, Iterator

_PIECE = 2**20  # characters
_LONGEST_LINE = 4096


def whole(least: int, most: int) -> Callable[[str], int]:
    """Return what reads a flag's whole number and refuses one outside its range."""

    def read(text: str) -> int:
        value = int(text)
        if least <= value <= most:
            return value
        limit = f"at least {least:,}" if value < least else f"at most {most:,}"
        raise argparse.ArgumentTypeError(f"found {value:,}, expected {limit}")

    read.__name__ = "int"  # in argparse's own messages
    return read


def above_zero(text: str) -> float:
    """Read a flag's number, with a fraction or without; refuse one that is not above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"found {text}, expected a finite number above 0")
    return value


above_zero.__name__ = "float"  # in argparse's own messages


def number(
    add: Callable[..., object],
    flag: str,
    metavar: str,
    least: int,
    most: int,
    words: str,
    **more: object,
) -> None:
    """Declare a flag that is a whole number within a range; its help names its default."""
    default = more.get("default")
    words += "" if default is None else f" (default: {default})"
    add(flag, type=whole(least, most), metavar=metavar, help=words, **more)


def pieces(path: str) -> Iterator[tuple[int, str]]:
    """Yield a text file in pieces of whole lines, each with the number of its first line.

    A byte order mark is left out; bytes that are no UTF-8 become U+FFFD, which is in no number.

    Raises:
        ValueError: a line is too long to hold a number.
    """
    with open(path, encoding="utf-8-sig", errors="replace") as stream:
        number, rest = 1, ""
        while piece := stream.read(_PIECE):
            lines, end, rest = (rest + piece).rpartition("\n")
            if len(rest) > _LONGEST_LINE:
                raise ValueError(
                    f"{path}: found a line of more than {_LONGEST_LINE:,} characters that begins "
                    f"with {shown(rest)}, expected a text file with one number a line"
                )
            yield number, lines
            number += lines.count("\n") + len(end)
        yield number, rest


def lines_of(first: int, piece: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a piece that say something, with their numbers."""
    for number, line in enumerate(piece.split("\n"), start=first):
        if text := line.strip():
            yield number, text


def shown(text: str) -> str:
    """The beginning of a line, quoted."""
    return repr(text[:60])


def read_speeds(path: str, ranks: int, what: str = "--ranks") -> tuple[float, ...]:
    """Return the speed of each rank that ``--rank-speeds`` names, one a line.

    1 is a rank as the cost model describes it; ``what`` names the ranks in the message.

    Raises:
        ValueError: a line is no positive number (named), or there is not one line a rank.
    """
    from megatron_hdp.planner.online import speeds_in

    lines = (line for piece in pieces(path) for line in lines_of(*piece))
    return speeds_in(lines, path, ranks, f"{what} {ranks:,}")

"""Tables of text, and figures in few characters."""

from collections.abc import Collection, Sequence

_UNITS = (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3))


def aligned(rows: Sequence[Sequence[str]], *, texts: Collection[int] = (0,)) -> list[str]:
    """Return lines with columns below each other.

    Args:
        rows: cells; the first row is the header.
        texts: columns that begin at their left; the others are figures.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if i in texts else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def short(number: float) -> str:
    """Return a number in three digits and a unit: ``1.23M``."""
    for unit, scale in _UNITS:
        if number >= scale:
            return f"{number / scale:.3g}{unit}"
    return f"{number:.3g}"

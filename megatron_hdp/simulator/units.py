"""Numbers for people: durations, sizes and counts in a unit that keeps them short, and tables."""

from collections.abc import Collection, Sequence

from megatron_hdp.planner.pipeline import Pipeline

_LARGE = 1e9
"""From here on three digits and a power of ten say as much as all digits."""


def seconds(value: float) -> str:
    """Return a duration in the unit that keeps it readable."""
    if value >= _LARGE:
        return f"{value:.3g} s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if value >= scale:
            return f"{value / scale:.3f} {unit}"
    return f"{value * 1e6:.3f} us"


def num_bytes(value: float) -> str:
    """Return a size in decimal units."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:.2f} {unit}"
    return f"{value:.0f} B"


def short(value: float) -> str:
    """Return a number in three digits and a unit: ``8.03B``."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g}{unit}"
    return f"{value:.3g}"


def stages_of(pipeline: Pipeline, words: str) -> str:
    """Return a pipeline in words that end with its stages; nothing if it is none."""
    virtual = f" of {pipeline.chunks} virtual stages each" if pipeline.chunks > 1 else ""
    return f"{words.format(pipeline.stages)}{virtual}" if pipeline.stages > 1 else ""


def aligned(rows: Sequence[Sequence[str]], *, texts: Collection[int] = (0,)) -> list[str]:
    """Return the lines of a table; the first row is the header.

    Args:
        rows: cells.
        texts: columns that are aligned at their left; the others are figures.
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

"""``--rank-speeds``: a text file with the speed of one rank a line."""

import math

from megatron_hdp.cli.text_files import numbered_lines, shown


def read_speeds(path: str, ranks: int) -> tuple[float, ...]:
    """Return the speed of each rank, 1 being a rank as the cost model describes it.

    Raises:
        ValueError: a line is no positive number (named), or there is not one line a rank.
    """
    speeds = [_speed(text, f"{path}, line {number}") for number, text in numbered_lines(path)]
    if len(speeds) != ranks:
        raise ValueError(
            f"{path} has {len(speeds):,} speeds, expected one a line for each of --ranks {ranks:,}"
        )
    return tuple(speeds)


def _speed(text: str, where: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        speed = math.nan
    if not (math.isfinite(speed) and speed > 0):
        raise ValueError(
            f"{where}: found {shown(text)}, expected the speed of one rank, a number above 0 "
            "(1 for a rank of full speed)"
        )
    return speed

"""Breaks a release by the same hand each time: every row of `scripts/breaking` in one table.

    python scripts/break.py [--room ROOM] [--only NAME] [--list]

Exit code 1: something did not hold. All rows take some 40 minutes on two cores; none needs a GPU.
"""

import argparse
import importlib
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from breaking.rows import ROWS, Result, Row, run

from megatron_hdp.exit_codes import ExitCode
from megatron_hdp.simulator.units import aligned

_MODULES = ("planning", "data", "others", "checkpoints", "weights", "sessions", "plane")


def rows_of(room: str | None = None, only: Iterable[str] = ()) -> list[Row]:
    """The rows of a room, or those of some names.

    Raises:
        ValueError: there is no such row.
    """
    sys.path.append(str(Path(__file__).parents[1]))  # rows use small models of the tests
    for module in _MODULES:
        importlib.import_module(f"breaking.{module}")
    names = list(only)
    if unknown := [name for name in names if name not in ROWS]:
        raise ValueError(f"found {', '.join(unknown)}; expected names that --list prints")
    chosen = [row for row in ROWS.values() if room in (None, row.room)]
    chosen = [row for row in chosen if not names or row.name in names]
    if not chosen:
        rooms = ", ".join(sorted({row.room for row in ROWS.values()}))
        raise ValueError(f"--room {room}: found no row; expected one of {rooms}")
    return chosen


def table(results: Sequence[Result]) -> str:
    """One line a row; below it, what did not hold."""
    lines = [("what is tried", "room", "tries", "held", "seconds")]
    notes = []
    for one in results:
        held = "yes" if one.has_held else "NO"
        name, room, count = one.row.name, one.row.room, f"{len(one.tries):,}"
        lines.append((name, room, count, held, f"{one.seconds:.1f}"))
        notes += [f"  {name}: {what}: {note}" for what, _, note in one.broken]
        if one.reason or not one.tries:
            notes.append(f"  {name}: {one.reason or 'nothing was tried'}")
    return "\n".join([*aligned(lines, texts=(0, 1)), *notes])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the rows and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--room", help="only the rows of this room")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="only this row")
    parser.add_argument("--list", action="store_true", help="print the rows and their time limits")
    arguments = parser.parse_args(argv)
    try:
        chosen = rows_of(arguments.room, arguments.only)
    except ValueError as error:
        parser.error(str(error))
    if arguments.list:
        lines = [("row", "room", "at most")]
        lines += [(row.name, row.room, f"{row.limit_s:,.0f} s") for row in chosen]
        print("\n".join(aligned(lines, texts=(0, 1))))
        return ExitCode.DONE
    results = []
    for row in chosen:
        results.append(run(row))
        print(f"{row.name}: {'held' if results[-1].has_held else 'BROKE'}", file=sys.stderr)
    print(table(results))
    return ExitCode.DONE if all(one.has_held for one in results) else ExitCode.FAILED


if __name__ == "__main__":
    sys.exit(main())

"""Compares two runs' metrics files in one table; fails unless their losses are the same."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median
from typing import Any

MAX_LOSS_DIFFERENCE = 1e-4  # relative; float32 sums in another order differ by less

Steps = list[dict[str, Any]]


def read_steps(path: Path) -> Steps:
    """Return one dictionary a step."""
    steps = [json.loads(line) for line in path.read_text().splitlines()]
    if not steps:
        raise ValueError(f"{path}: found no step, expected one JSON object a line: run it again")
    return steps


def compare(static: Steps, hdp: Steps) -> tuple[str, float]:
    """Return the table and the largest relative difference of the losses.

    Raises:
        ValueError: the runs have other steps, other data or a loss that is no number.
    """
    worst = 0.0
    rows = [("", "static", "HDP", "")]
    if [step["step"] for step in static] != [step["step"] for step in hdp]:
        raise ValueError(f"found {len(static)} and {len(hdp)} steps, expected the same steps")
    for a, b in zip(static, hdp, strict=True):
        if a["loss"] is None or b["loss"] is None or a["tokens"] != b["tokens"]:
            raise ValueError(f"step {a['step']}: losses or tokens cannot be compared: {a} {b}")
        difference = abs(a["loss"] - b["loss"]) / abs(a["loss"])
        worst = max(worst, difference)
        label = f"loss, step {a['step']}"
        rows.append((label, f"{a['loss']:.6f}", f"{b['loss']:.6f}", f"differs by {difference:.0e}"))
    rows += [
        _ratio("tokens/s (median step)", static, hdp, median, "tokens_per_second", 1, ",.0f"),
        _ratio("ring traffic a step (MB)", static, hdp, fmean, "ring_bytes", 1e-6, ",.1f"),
        _ratio("planned efficiency", static, hdp, fmean, "planned_efficiency", 1, ".3f"),
        _ratio("measured efficiency", static, hdp, fmean, "measured_efficiency", 1, ".3f"),
        _ratio("planning (ms, median)", static, hdp, median, "planning_ms", 1, ".2f"),
        ("micro-batches a rank", _micro_batches(static), _micro_batches(hdp), ""),
    ]
    return _format(rows), worst


def _ratio(
    label: str,
    static: Steps,
    hdp: Steps,
    average: Callable[[list[float]], float],
    key: str,
    scale: float,
    form: str,
) -> tuple[str, str, str, str]:
    a, b = (scale * average([step[key] for step in run]) for run in (static, hdp))
    return label, format(a, form), format(b, form), f"x {b / a:.2f}" if a else ""


def _micro_batches(run: Steps) -> str:
    fewest = min(step["micro_batches_min"] for step in run)
    return f"{fewest}-{max(step['micro_batches_max'] for step in run)}"


def _format(rows: list[tuple[str, str, str, str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in (1, 2, 3))]).rstrip()
        for row in rows
    ]
    lines.insert(1, "-" * (sum(widths) + 6))
    return "\n".join(lines)


def main(static_path: str, hdp_path: str) -> int:
    """Print the comparison; return 1 when the losses differ."""
    table, worst = compare(read_steps(Path(static_path)), read_steps(Path(hdp_path)))
    print(table)
    if worst > MAX_LOSS_DIFFERENCE:
        print(f"error: losses differ by {worst:.1e}, expected at most {MAX_LOSS_DIFFERENCE:.0e}")
        return 1
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: quickstart_report.py STATIC.jsonl HDP.jsonl")
    try:
        sys.exit(main(*sys.argv[1:]))
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")

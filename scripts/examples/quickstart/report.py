"""The quickstart's result: one sentence, one table, one picture.

``python scripts/examples/quickstart/report.py FOLDER`` compares ``FOLDER/static`` with
``FOLDER/hdp``, draws ``FOLDER/measured.png``, and fails unless the losses of both runs are the
same.
"""

import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median_low

import picture
from measured import (
    Step,
    busy_share,
    cpu_s_of,
    nearest_step,
    read_run,
    seconds_of,
    speedup,
    wait_share,
)

from megatron_hdp.simulator.units import aligned

MAX_LOSS_DIFFERENCE = 1e-4  # relative; float32 sums in another order differ by less
_WIDTH = 100
Row = tuple[str, ...]


def loss_difference(static: Sequence[Step], hdp: Sequence[Step]) -> float:
    """Return the largest relative difference of the losses.

    Raises:
        ValueError: the runs have other steps, other data or a loss that is no number.
    """
    if [step.number for step in static] != [step.number for step in hdp]:
        raise ValueError(f"found {len(static)} and {len(hdp)} steps, expected the same steps")
    worst = 0.0
    for a, b in zip(static, hdp, strict=True):
        if None in (a.metrics["loss"], b.metrics["loss"]) or (
            a.metrics["tokens"] != b.metrics["tokens"]
        ):
            raise ValueError(
                f"step {a.number}: losses or tokens cannot be compared: {a.metrics} {b.metrics}"
            )
        worst = max(worst, abs(a.metrics["loss"] - b.metrics["loss"]) / abs(a.metrics["loss"]))
    return worst


def sentence(static: Sequence[Step], hdp: Sequence[Step], worst: float) -> str:
    """Return what both strategies cost, over all steps.

    Args:
        static: steps of the static mesh.
        hdp: the same steps under HDP.
        worst: largest relative difference of their losses.
    """
    steps = "the only step" if len(hdp) == 1 else f"the {len(hdp)} steps"
    took = f"{seconds_of(static):.1f} s and HDP {seconds_of(hdp):.1f} s"
    same = f"for the same losses (they differ by {worst:.0e} at most)"
    gain = f"{speedup(static, hdp):.2f} x as fast"
    if len(hdp[0].ranks) == 1:
        return _wrapped(
            f"One rank has nothing to balance: {steps} took static {took}, {same}; both run every "
            f"sequence whole, so HDP was {gain} by the machine's noise alone."
        )
    return _wrapped(
        f"{steps.capitalize()} took the static mesh {took}, which sent {_ring_mb(static)} and "
        f"{_ring_mb(hdp)} MB a step around their rings, {same}: HDP trained {gain}."
    )


def bound(static: Sequence[Step], hdp: Sequence[Step], cores: int) -> str:
    """Return what bounds the gain of several ranks: busier cores and less work, over all steps."""
    ranks = len(hdp[0].ranks)
    cpu_s, hdp_cpu_s = cpu_s_of(static), cpu_s_of(hdp)
    gain, less_work = speedup(static, hdp), cpu_s / hdp_cpu_s
    busy, hdp_busy = (busy_share(run, cores) for run in (static, hdp))
    why = "each rank has a core of its own, which is idle while it waits"
    if ranks > cores:
        shared = _counted(cores, "core")
        why = f"{ranks} ranks share {shared}, and one that waits leaves its core to another"
    return _wrapped(
        f"What bounds the gain: {why}. Ranks waited {wait_share(static):.0%} of static's time and "
        f"{wait_share(hdp):.0%} of HDP's; they kept their cores busy for {busy:.0%} and "
        f"{hdp_busy:.0%} of it. Of the {gain:.2f} x, {gain / less_work:.2f} x comes from busier "
        f"cores and {less_work:.2f} x from less work ({cpu_s:.1f} and {hdp_cpu_s:.1f} s of "
        "CPU time), because short sequences stay whole. With these cores always busy it would be "
        f"{max(gain, gain / hdp_busy):.2f} x."
    )


def table(static: Sequence[Step], hdp: Sequence[Step]) -> str:
    """Return every step's losses and speeds, and what else was measured, averaged over steps."""
    shown = nearest_step(static, hdp)
    steps: list[Row] = [("step", "loss: static", "HDP", "tokens/s: static", "HDP", "")]
    for place, (a, b) in enumerate(zip(static, hdp, strict=True)):
        losses = (f"{one.metrics['loss']:.6f}" for one in (a, b))
        speeds = (f"{one.metrics['tokens_per_second']:,.0f}" for one in (a, b))
        ratio = f"x {a.seconds / b.seconds:.2f}" + (" shown" if place == shown else "      ")
        steps.append((f"{a.number}", *losses, *speeds, ratio))
    speeds = (f"{_tokens_per_second(run):,.0f}" for run in (static, hdp))
    steps.append(("all", "", "", *speeds, f"x {speedup(static, hdp):.2f}      "))
    runs: list[Row] = [
        ("mean of all steps", "static", "HDP", ""),
        _ratio("ring traffic (MB)", static, hdp, fmean, "ring_bytes", 1e-6, ",.1f"),
        _ratio("planned efficiency", static, hdp, fmean, "planned_efficiency", 1, ".3f"),
        _ratio("measured efficiency", static, hdp, fmean, "measured_efficiency", 1, ".3f"),
        _ratio("planning (ms, median)", static, hdp, median_low, "planning_ms", 1, ".2f"),
        ("micro-batches a rank", _micro_batches(static), _micro_batches(hdp), ""),
    ]
    return f"{_format(steps)}\n\n{_format(runs)}"


def _tokens_per_second(run: Sequence[Step]) -> float:
    tokens = sum(step.metrics["tokens_per_second"] * step.seconds for step in run)
    return tokens / seconds_of(run)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _WIDTH, break_on_hyphens=False)


def _ring_mb(run: Sequence[Step]) -> str:
    """Ring traffic of a step, the mean of all."""
    return f"{fmean(step.metrics['ring_bytes'] for step in run) / 1e6:,.0f}"


def _ratio(
    label: str,
    static: Sequence[Step],
    hdp: Sequence[Step],
    average: Callable[[list[float]], float],
    key: str,
    scale: float,
    form: str,
) -> Row:
    a, b = (scale * average([step.metrics[key] for step in run]) for run in (static, hdp))
    return label, format(a, form), format(b, form), f"x {b / a:.2f}" if a else ""


def _micro_batches(run: Sequence[Step]) -> str:
    fewest = min(step.metrics["micro_batches_min"] for step in run)
    return f"{fewest}-{max(step.metrics['micro_batches_max'] for step in run)}"


def _format(rows: Sequence[Row]) -> str:
    """The first column to the left, the others to the right, a line under the heads."""
    lines = [line.removeprefix("  ") for line in aligned(rows)]
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)


def _num_cores() -> int:
    """Cores that this process, and so the ranks, may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def main(folder: Path) -> int:
    """Print sentence, table and bound, draw the picture; return 1 when the losses differ."""
    runs = read_run(folder / "static"), read_run(folder / "hdp")
    worst = loss_difference(*runs)
    if worst > MAX_LOSS_DIFFERENCE:
        print(table(*runs))
        print(f"error: losses differ by {worst:.1e}, expected at most {MAX_LOSS_DIFFERENCE:.0e}")
        return 1
    shown, cores = nearest_step(*runs), _num_cores()
    static, hdp = (run[shown] for run in runs)
    ranks, degree = len(hdp.ranks), static.largest_degree
    parts = [sentence(*runs, worst), table(*runs)]
    if ranks > 1:
        parts.append(bound(*runs, cores))
    title = (
        f"Measured: step {static.number} of {len(runs[0])}, its speed-up is nearest to that of all "
        f"steps; {_counted(ranks, 'rank')} on {_counted(cores, 'core')}"
    )
    name = f"static mesh, DP {ranks // degree} x CP {degree}"
    figure = picture.draw({name: static, "hybrid data parallelism": hdp}, title)
    figure.savefig(folder / "measured.png")
    parts.append(f"the picture of step {hdp.number}: {folder / 'measured.png'}")
    print("\n\n".join(parts))
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: report.py FOLDER")
    try:
        sys.exit(main(Path(sys.argv[1])))
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")

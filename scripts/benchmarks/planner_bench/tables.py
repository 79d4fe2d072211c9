"""Markdown tables of strategies side by side, and below them why cells are empty or marked."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean

from planner_bench.cases import Case
from planner_bench.markdown import NOT_RUN, head, known, mark, mean_and_worst, notes, row
from planner_bench.measuring import NOISY_STEPS, Result


def tables(cases: Sequence[Case], strategies: Sequence[str], results: Sequence[Result]) -> str:
    """Return the Markdown tables, and below them why cells are empty or marked."""
    goals = {case.name: case.goal for case in cases}
    cells: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        cells.setdefault((result.case, result.strategy), []).append(result)

    def table(
        title: str, note: str, cell: Callable[[list[Result]], str], goal: bool = False
    ) -> list[str]:
        header = ["case", *strategies, *(["goal"] if goal else [])]
        lines = ["", f"### {title}", "", note, "", *head(header)]
        for name, wanted in goals.items():
            shown = [cell(cells.get((name, strategy), [])) for strategy in strategies]
            lines.append(row([name, *shown, *([wanted] if goal else [])]))
        return lines

    lines = table(
        "Bound / makespan",
        "Mean over the seeds (worst).",
        lambda of: mean_and_worst(of, "bound_share"),
        goal=True,
    )
    lines += table(
        "Proven bound / makespan",
        "The same with the tightest bound that is proven for the batch: 1 is optimal.",
        lambda of: mean_and_worst(of, "proven_share"),
    )
    lines += table(
        "Efficiency",
        "(Total compute / sum of speeds) / makespan, mean over the seeds.",
        lambda of: _mean(of, "efficiency", 1, ".3f"),
    )
    lines += table(
        "Ring traffic",
        "TB of a global batch, forward and backward, mean over the seeds.",
        lambda of: _mean(of, "ring_bytes", 1e-12, ",.1f"),
    )
    lines += table(
        "Planning time",
        "Milliseconds: median of several runs, mean over the seeds.",
        lambda of: _mean(of, "planning_ms", 1, ",.1f"),
    )
    for strength in dict.fromkeys(key for result in results for key in result.lost_to_noise):
        for title, base in (("", "the makespan without it"), (", of the bound", "the bound")):
            lines += table(
                f"Lost to noise of {strength:g} %{title}",
                "Time lost to lognormal noise of mean 1 on every member of every micro-batch, in % "
                f"of {base}: {NOISY_STEPS} steps a batch, mean over the seeds (worst).",
                partial(_lost, strength=strength, of_the_bound=bool(title)),
            )
    return "\n".join([*lines, "", *notes(results)])


def _mean(of: Sequence[Result], name: str, scale: float, form: str) -> str:
    figures = known(of, name)
    return format(scale * fmean(figures), form) + mark(of) if figures else NOT_RUN


def _lost(of: Sequence[Result], strength: float, of_the_bound: bool) -> str:
    lost = [
        100 * value * (_over_the_bound(result) if of_the_bound else 1)
        for result in of
        if (value := result.lost_to_noise.get(strength)) is not None
    ]
    return f"{fmean(lost):.1f} ({max(lost):.1f})" if lost else NOT_RUN


def _over_the_bound(result: Result) -> float:
    return (result.makespan_s or 0.0) / (result.lower_bound_s or math.inf)

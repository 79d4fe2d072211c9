"""Markdown tables of strategies side by side, and below them why cells are empty or marked."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean

from planner_bench.cases import Case
from planner_bench.markdown import NOT_RUN, head, mark, notes, row
from planner_bench.measuring import NOISY_STEPS, Result


def tables(cases: Sequence[Case], strategies: Sequence[str], results: Sequence[Result]) -> str:
    """Return the Markdown tables, and below them why cells are empty or marked."""
    goals = {case.name: case.goal for case in cases}
    cells: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        cells.setdefault((result.case, result.strategy), []).append(result)

    def table(title: str, note: str, cell: Callable[[list[Result]], str], goal: bool) -> list[str]:
        header = ["case", *strategies, *(["goal"] if goal else [])]
        lines = ["", f"### {title}", "", note, "", *head(header)]
        for name, wanted in goals.items():
            shown = [cell(cells.get((name, strategy), [])) for strategy in strategies]
            lines.append(row([name, *shown, *([wanted] if goal else [])]))
        return lines

    lines = table(
        "Bound / makespan",
        "Mean over the seeds (worst). With pipeline stages: target / makespan, the target being "
        "bound / P + (P - 1) / P x a full single-rank micro-batch.",
        lambda of: _mean_and_worst(of, "bound_share"),
        goal=True,
    )
    lines += table(
        "Proven bound / makespan",
        "The same with the tightest bound that is proven for the batch: 1 is optimal.",
        lambda of: _mean_and_worst(of, "proven_share"),
        goal=False,
    )
    if any(case.pipeline_stages > 1 for case in cases):
        lines += table(
            "Greater of target and proven bound / makespan",
            "With pipeline stages; without them it is the proven bound.",
            lambda of: _mean_and_worst(of, "greater_share"),
            goal=False,
        )
    lines += table(
        "Efficiency",
        "(Total compute / sum of speeds / stages) / makespan, mean over the seeds.",
        lambda of: _mean(of, "efficiency", 1, ".3f"),
        goal=False,
    )
    lines += table(
        "Ring traffic",
        "TB of a global batch, forward and backward, mean over the seeds.",
        lambda of: _mean(of, "ring_bytes", 1e-12, ",.1f"),
        goal=False,
    )
    lines += table(
        "Planning time",
        "Milliseconds: median of several runs, mean over the seeds.",
        lambda of: _mean(of, "planning_ms", 1, ",.1f"),
        goal=False,
    )
    for strength in dict.fromkeys(key for result in results for key in result.lost_to_noise):
        for title, base in (("", "the makespan without it"), (", of the bound", "the bound")):
            lines += table(
                f"Lost to noise of {strength:g} %{title}",
                "Time lost to lognormal noise of mean 1 on every member of every micro-batch, in % "
                f"of {base}: {NOISY_STEPS} steps a batch, mean over the seeds (worst).",
                partial(_lost, strength=strength, of_the_bound=bool(title)),
                goal=False,
            )
    return "\n".join([*lines, "", *notes(results)])


def _figures(of: Sequence[Result], name: str) -> list[float]:
    return [value for result in of if (value := getattr(result, name)) is not None]


def _mean(of: Sequence[Result], name: str, scale: float, form: str) -> str:
    figures = _figures(of, name)
    return format(scale * fmean(figures), form) + mark(of) if figures else NOT_RUN


def _mean_and_worst(of: Sequence[Result], name: str) -> str:
    figures = _figures(of, name)
    if not figures:
        return NOT_RUN
    return f"{fmean(figures):.3f} ({min(figures):.3f})" + mark(of)


def _lost(of: Sequence[Result], strength: float, of_the_bound: bool) -> str:
    lost = [
        100 * value * (_over_the_bound(result) if of_the_bound else 1)
        for result in of
        if (value := result.lost_to_noise.get(strength)) is not None
    ]
    return f"{fmean(lost):.1f} ({max(lost):.1f})" if lost else NOT_RUN


def _over_the_bound(result: Result) -> float:
    return (result.makespan_s or 0.0) / (result.lower_bound_s or math.inf)

"""Curves and piles of a run: parts of a step, step times, who computes, memory."""

from collections.abc import Mapping

import numpy as np

from megatron_hdp.arrays import Float64Array
from megatron_hdp.simulator.charts import COLOURS, Chart
from megatron_hdp.simulator.execution import MemoryTrace, Outcome, Run, StepExecution
from megatron_hdp.simulator.report.bars import computing_share
from megatron_hdp.simulator.report.figures import PARTS, Subject, mean_parts
from megatron_hdp.simulator.units import seconds
from megatron_hdp.strategies import BASELINE

MAX_STEPS = 500
"""Whose times are drawn, evenly spaced."""
MAX_PLACES = 600
"""Of a curve over the time of a step."""
_TOO_LONG = 2.0  # times the static mesh's step: such a step is cut


def planned(run: Run) -> dict[str, Outcome]:
    """The strategies that have a plan."""
    return {name: one for name, one in run.outcomes.items() if one.steps}


def colours_of(run: Run) -> dict[str, str]:
    """Colours of the strategies, by name."""
    return {name: COLOURS[8 + i % 8] for i, name in enumerate(run.outcomes)}


def first_steps(run: Run) -> dict[str, StepExecution]:
    """The first step of each strategy."""
    return {name: one.first for name, one in run.outcomes.items() if one.first is not None}


def window_s(ends: Mapping[str, float]) -> float:
    """Where a common axis of time ends: at the longest step that is not much beyond the mesh's.

    Without a mesh it is the shortest step that others are held to. Ends are seconds of a step of
    each strategy.
    """
    reference = ends.get(BASELINE, min(ends.values()))
    return max(end for end in ends.values() if end <= _TOO_LONG * reference)


def first_window_s(run: Run) -> float:
    """The same of the first steps."""
    return window_s({name: one.step_s for name, one in first_steps(run).items()})


def parts_chart(run: Run) -> Chart:
    """Where the time of a step goes."""
    names = planned(run)
    parts = {name: mean_parts(one.steps) for name, one in names.items()}
    shown = [part for part in PARTS if any(one[part] > 0 for one in parts.values())]
    steps = len(next(iter(names.values())).steps)
    return Chart(
        kind="piles",
        title="Where the time of a step goes",
        note="Compute, exposed ring traffic, host copies and waiting are means of the ranks; "
        f"bars are means of {steps:,} step{'s' if steps > 1 else ''} and their parts add up.",
        x_label="seconds of a step",
        y_label="strategy",
        x=list(names),
        series={part: [one[part] for one in parts.values()] for part in shown},
        colours=[PARTS[part] for part in shown],
        unit="s",
        x_end=window_s({name: sum(one.values()) for name, one in parts.items()}),
    )


def steps_chart(run: Run) -> Chart:
    """How long each step takes."""
    names, colours = planned(run), colours_of(run)
    total = len(next(iter(names.values())).steps)
    chosen = np.unique(np.linspace(0, total - 1, min(total, MAX_STEPS)).round().astype(int))
    notes = [] if len(chosen) == total else [f"{len(chosen):,} of {total:,} steps, evenly spaced."]
    typical = {name: one.step_time_s or 0.0 for name, one in names.items()}
    until_s = window_s(typical)
    if longer := {name: time for name, time in typical.items() if time > until_s}:
        told = ", ".join(f"{name} with {seconds(time)}" for name, time in longer.items())
        notes.append(f"Not drawn, far beyond the others: {told}.")
    names = {name: one for name, one in names.items() if name not in longer}
    return Chart(
        kind="lines",
        title="Step times",
        note=" ".join(notes),
        x_label="step",
        y_label="step time",
        x=[float(i + 1) for i in chosen.tolist()],
        series={
            name: [one.steps[i].step_s for i in chosen.tolist()] for name, one in names.items()
        },
        colours=[colours[name] for name in names],
        unit="s",
    )


def computing_chart(run: Run) -> Chart:
    """Share of the ranks that compute, over the time of the first step."""
    steps, colours = first_steps(run), colours_of(run)
    series, places, until_s = {}, {}, first_window_s(run)
    for name, one in steps.items():
        edges = np.linspace(0.0, min(one.step_s, until_s), MAX_PLACES // 2 + 1)
        edges = np.unique([*edges, one.step_s])
        share = computing_share(one, edges)
        series[name] = [*np.clip(share, 0.0, 1.0).round(6).tolist(), 0.0]
        places[name] = edges.tolist()
    return Chart(
        kind="stairs",
        title="Who computes",
        note="Share of the ranks (and stages) that do work of their own, over the first step.",
        x_label="time in the step",
        y_label="share that computes",
        series=series,
        own_x=places,
        colours=[colours[name] for name in steps],
        x_unit="s",
        unit="share",
        x_end=until_s,
    )


def memory_chart(run: Run, subject: Subject) -> Chart | None:
    """Memory of the fullest GPU over the first step; None where it is not known."""
    traces = {name: one.memory for name, one in first_steps(run).items() if one.memory is not None}
    if not traces:
        return None
    colours = colours_of(run)
    ends = {name: one.step_s for name, one in first_steps(run).items()}
    curves = {name: thinned(trace, ends[name]) for name, trace in traces.items()}
    limit = subject.gpu_memory_bytes
    where = ", ".join(
        f"{name} rank {trace.rank:,}"
        + (f" stage {trace.stage}" if run.setting.pipeline.stages > 1 else "")
        for name, trace in traces.items()
    )
    return Chart(
        kind="stairs",
        title="Memory of the fullest GPU",
        note=f"Over the first step: {where}.",
        x_label="time in the step",
        y_label="memory",
        series={name: curve[1].tolist() for name, curve in curves.items()},
        own_x={name: curve[0].tolist() for name, curve in curves.items()},
        limits={} if limit is None else {"a GPU has": limit},
        colours=[colours[name] for name in traces],
        x_unit="s",
        unit="bytes",
        x_end=first_window_s(run),
    )


def thinned(trace: MemoryTrace, step_s: float) -> tuple[Float64Array, Float64Array]:
    """A trace to the end of the step, of few places: of each stretch the most that is held."""
    times = np.append(trace.time_s, step_s)
    held = np.append(trace.num_bytes, trace.fixed_bytes)
    if len(times) <= MAX_PLACES:
        return times, held
    begins = np.linspace(0, len(times), MAX_PLACES, endpoint=False).astype(int)
    return times[begins], np.maximum.reduceat(held, begins)


def all_charts(run: Run, subject: Subject) -> list[Chart]:
    """Those of a page, from top to bottom; none where no strategy has a plan."""
    if not planned(run):
        return []
    charts = [parts_chart(run), computing_chart(run), memory_chart(run, subject)]
    if max(len(one.steps) for one in run.outcomes.values()) > 1:
        charts.append(steps_chart(run))
    return [one for one in charts if one is not None]

"""A run as one HTML file without a network: text and tables as they are, charts by a script."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_hdp.simulator import page
from megatron_hdp.simulator.charts import on_page
from megatron_hdp.simulator.execution import Run
from megatron_hdp.simulator.palette import Palette
from megatron_hdp.simulator.report.bars import Gantt, gantt_of
from megatron_hdp.simulator.report.charts import MAX_STEPS, all_charts, first_steps, first_window_s
from megatron_hdp.simulator.report.figures import PARTS, Subject, headline
from megatron_hdp.simulator.report.tables import closing, opening, parts_table

_ARRAYS = (
    *("row", "start_s", "busy_s", "end_s", "micro_batch", "degree", "tokens", "joined"),
    *("backward", "chunk"),
)


def write_page(run: Run, subject: Subject, path: str) -> None:
    """Write a report's page to ``path``."""
    gantts = gantts_of(run)
    charts = [on_page(one) for one in all_charts(run, subject)]
    document = {
        "figures": {name: _short(run.figures(name)) for name in run.outcomes},
        "charts": {"parts": charts[:1], "charts": charts[1:]},
        "bars": _bars_on_page(run, gantts),
    }
    body = (
        f'{opening(run, subject)}<div id="parts"></div>\n{parts_table(run)}'
        '<section id="bars"></section>\n<div id="charts"></div>\n'
        f"{closing(run, subject, left_out(run, gantts))}"
    )
    page.write_page(path, headline(run), body, document)


def gantts_of(run: Run) -> dict[str, Gantt]:
    """The first step of each strategy."""
    always = run.setting.disturbance.slow
    return {name: gantt_of(one, always) for name, one in first_steps(run).items()}


def palette_of(gantts: Mapping[str, Gantt], num_ranks: int) -> Palette:
    """One for all strategies, so that they can be compared."""
    return Palette.of_degrees(np.concatenate([one.degree for one in gantts.values()]), num_ranks)


def left_out(run: Run, gantts: Mapping[str, Gantt]) -> list[str]:
    """What is there and not shown."""
    found = []
    for name, one in gantts.items():
        if len(one.ranks) < one.num_ranks:
            found.append(
                f"{name}: {one.num_ranks - len(one.ranks):,} of {one.num_ranks:,} ranks; shown are "
                f"{len(one.ranks)}, evenly spaced, with the busiest, the idlest and slow ones"
            )
        if one.num_joined:
            found.append(f"{name}: {one.num_joined:,} short bars are drawn together with others")
    steps = max((len(one.steps) for one in run.outcomes.values()), default=0)
    if steps > 1:
        found.append(f"bars, curves over the time of a step: of the first of {steps:,} steps")
    if steps > MAX_STEPS:
        found.append(f"step times of {steps - MAX_STEPS:,} steps")
    return found


def _short(figures: dict[str, Any]) -> dict[str, Any]:
    """Figures without those of each step, of which there may be a million."""
    return {name: value for name, value in figures.items() if name != "steps"}


def _bars_on_page(run: Run, gantts: Mapping[str, Gantt]) -> dict[str, Any] | None:
    if not gantts:
        return None
    first = next(iter(gantts.values()))
    note = "A bar is a rank's own work on a micro-batch, coloured by the ranks of its ring"
    if first.stages > 1:
        note += f"; a rank has a row for each of its {first.stages} stages"
        note += "; a forward is paler than its backward"
    if any(len(one.ranks) < one.num_ranks for one in gantts.values()):
        note += f". Some of {first.num_ranks:,} HDP ranks are shown"
    return page.bars_on_page(
        [_gantt_on_page(name, one) for name, one in gantts.items()],
        palette_of(gantts, run.setting.ranks),
        first_window_s(run),
        note=f"{note}.",
        legend=[
            page.WAITING,
            *{part: PARTS[part] for one in gantts.values() for part, *_ in one.behind}.items(),
        ],
        title="One step of each strategy, on one scale of time",
    )


def _gantt_on_page(name: str, one: Gantt) -> dict[str, Any]:
    return {
        "name": name,
        "ranks": one.ranks,
        "rows": len(one.ranks) * one.stages,
        "stages": one.stages,
        "chunks": one.chunks,
        "makespan": one.makespan_s,
        "step": one.step_s,
        "limits": [],
        "behind": [[part, at, length, PARTS[part]] for part, at, length in one.behind],
        "arrays": page.encoded({name: getattr(one, name) for name in _ARRAYS}),
    }

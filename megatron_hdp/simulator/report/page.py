"""A run as one HTML file without a network: text and tables as they are, charts by a script."""

from collections.abc import Mapping
from html import escape
from typing import Any

import numpy as np

from megatron_hdp.simulator.charts import chart_places, on_page
from megatron_hdp.simulator.execution import Run
from megatron_hdp.simulator.filling import encoded, script_data, text_of, write_filled
from megatron_hdp.simulator.palette import Palette, pale
from megatron_hdp.simulator.report.bars import Gantt, gantt_of
from megatron_hdp.simulator.report.charts import MAX_STEPS, all_charts, first_steps, first_window_s
from megatron_hdp.simulator.report.figures import headline
from megatron_hdp.simulator.report.parts import PARTS
from megatron_hdp.simulator.report.subject import Subject
from megatron_hdp.simulator.report.tables import closing, opening, parts_table


def write_page(run: Run, subject: Subject, path: str) -> None:
    """Write a report's page to ``path``."""
    gantts = gantts_of(run)
    document = {
        "figures": {name: _short(run.figures(name)) for name in run.outcomes},
        "charts": [on_page(one) for one in all_charts(run, subject)],
        **_gantts_on_page(run, gantts),
    }
    template = text_of("megatron_hdp.simulator.report", "page.html")
    places = {
        "__TITLE__": escape(headline(run)),
        "__OPENING__": opening(run, subject),
        "__PARTS__": parts_table(run),
        "__CLOSING__": closing(run, subject, left_out(run, gantts)),
        "__GANTT__": text_of("megatron_hdp.simulator.report", "gantt.js"),
        "__REPORT__": script_data(document),
        **chart_places(),
    }
    write_filled(path, template, places)


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


def _gantts_on_page(run: Run, gantts: Mapping[str, Gantt]) -> dict[str, Any]:
    if not gantts:
        return {"gantts": []}
    palette = palette_of(gantts, run.setting.ranks)
    return {
        "gantts": [
            {
                "name": name,
                "ranks": one.ranks,
                "numRanks": one.num_ranks,
                "stages": one.stages,
                "chunks": one.chunks,
                "makespan": one.makespan_s,
                "step": one.step_s,
                "behind": [[part, at, length, PARTS[part]] for part, at, length in one.behind],
                "arrays": {key: encoded(array) for key, array in _arrays(one).items()},
            }
            for name, one in gantts.items()
        ],
        "window": first_window_s(run),
        "mostOfGroup": [most for _, most in palette.groups],
        "groupNames": palette.names,
        "colours": palette.colours,
        "pale": [pale(colour) for colour in palette.colours],
    }


def _arrays(one: Gantt) -> dict[str, Any]:
    return {
        "row": one.row.astype(np.int32),
        "start": one.start_s,
        "busy": one.busy_s,
        "end": one.end_s,
        "microBatch": one.micro_batch.astype(np.int32),
        "degree": one.degree.astype(np.int32),
        "tokens": one.tokens.astype(np.float64),
        "joined": one.joined.astype(np.int32),
        "backward": one.backward.astype(np.uint8),
        "chunk": one.chunk.astype(np.int32),
    }

"""A run as a picture: the sentence, where the time goes, a step of each strategy, curves."""

from typing import Any

import numpy as np

from megatron_hdp.simulator.charts import draw, save
from megatron_hdp.simulator.execution import Run
from megatron_hdp.simulator.palette import IDLE, Palette
from megatron_hdp.simulator.plot import add_bars, add_rectangles, import_figure, legend_of
from megatron_hdp.simulator.report.bars import Gantt
from megatron_hdp.simulator.report.charts import all_charts, first_window_s
from megatron_hdp.simulator.report.figures import PARTS, Subject, headline
from megatron_hdp.simulator.report.page import gantts_of, palette_of
from megatron_hdp.simulator.report.tables import about

_INCHES = 2.3  # of a chart
_PILE_INCHES = 0.3
_ROW_INCHES = 0.09


def write_picture(run: Run, subject: Subject, path: str) -> None:
    """Draw a report; the suffix gives the format.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure_class = import_figure("a picture", ", or write a page (.html)")
    charts, gantts = all_charts(run, subject), gantts_of(run)
    tall = [1.0 + _PILE_INCHES * len(gantts)] * min(1, len(charts))
    tall += [0.6 + _ROW_INCHES * len(one.ranks) * one.stages for one in gantts.values()]
    tall += [_INCHES] * max(0, len(charts) - 1)
    figure = figure_class(figsize=(12.0, 0.9 + sum(tall)), dpi=95, layout="constrained")
    figure.suptitle(
        f"{headline(run)}\n{about(run, subject)}", x=0.01, ha="left", fontsize=10, wrap=True
    )
    if charts:
        places = figure.subplots(len(tall), height_ratios=tall, squeeze=False)[:, 0]
        draw(places[0], charts[0])
        palette = palette_of(gantts, run.setting.ranks)
        until_s = first_window_s(run)
        for axes, (name, one) in zip(places[1:], gantts.items(), strict=False):
            _draw_gantt(axes, name, one, palette, until_s)
        legend_of(places[1], palette, [("waiting", IDLE)])
        for axes, chart in zip(places[1 + len(gantts) :], charts[1:], strict=True):
            draw(axes, chart)
    save(figure, path)


def _draw_gantt(axes: Any, name: str, one: Gantt, palette: Palette, until_s: float) -> None:
    rows = len(one.ranks) * one.stages
    every_row = np.arange(rows)
    zero = np.zeros(rows)
    add_rectangles(axes, every_row, zero, zero + one.makespan_s, IDLE, separate=True)
    for part, at, length in one.behind:
        add_rectangles(axes, every_row, zero + at, zero + at + length, PARTS[part], separate=True)
    busy_s = one.start_s, one.start_s + one.busy_s
    for backward in (False, True):
        mine, is_pale = one.backward == backward, one.stages > 1 and not backward
        add_bars(axes, one.row, *busy_s, one.degree, mine, palette, is_pale, separate=True)
    axes.set_xlim(0, until_s)
    axes.set_ylim(rows - 0.5, -0.5)
    cut = f", cut at {until_s:.4g} s" if one.step_s > until_s else ""
    axes.set_title(f"{name}: {one.step_s:.4g} s{cut}", loc="left", fontsize=10)
    marked = sorted({0, len(one.ranks) // 2, len(one.ranks) - 1})
    axes.set_yticks(
        [(i + 0.5) * one.stages - 0.5 for i in marked], [f"{one.ranks[i]:,}" for i in marked]
    )
    axes.set_xlabel("seconds")
    axes.set_ylabel("HDP rank")
    axes.spines[["top", "right", "left"]].set_visible(False)

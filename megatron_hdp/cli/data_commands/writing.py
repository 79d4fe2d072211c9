"""Charts as a picture or as a page, by the file's name."""

import os
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any

import numpy as np
import orjson

from megatron_hdp.cli.data_commands.charts import Chart, colour_of
from megatron_hdp.simulator.files import complete_file
from megatron_hdp.simulator.plot import import_figure

_PLACE = "__CHARTS__"
_MOST_NAMES = 24  # of bars that stand upright below them


def write_charts(path: str, title: str, charts: Sequence[Chart], text: str) -> None:
    """Write charts to a file; a page holds the text, too.

    Raises:
        ImportError: a picture is wanted, and matplotlib is not installed.
    """
    if path.endswith(".html"):
        _write_page(path, title, charts, text)
    else:
        _write_picture(path, title, charts)


def _write_page(path: str, title: str, charts: Sequence[Chart], text: str) -> None:
    document = {
        "title": title,
        "text": text,
        "charts": [
            {**asdict(one), "colours": [colour_of(i) for i in range(len(one.series))]}
            for one in charts
        ],
    }
    # "<" never stands in a script's data: a name could close the script
    data = orjson.dumps(document).decode().replace("<", "\\u003c")
    template = files("megatron_hdp.cli.data_commands").joinpath("page.html").read_text("utf-8")
    before, after = template.split(_PLACE)
    with complete_file(path) as temporary, open(temporary, "w", encoding="utf-8") as stream:
        stream.writelines((before, data, after))


def _write_picture(path: str, title: str, charts: Sequence[Chart]) -> None:
    figure_class = import_figure("a picture", ", or write a page (.html)")
    figure = figure_class(figsize=(11.0, 3.6 * len(charts)), dpi=130, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    for chart, axes in zip(charts, figure.subplots(len(charts), squeeze=False)[:, 0], strict=True):
        _draw(axes, chart)
    with complete_file(path) as temporary:
        figure.savefig(temporary, format=os.path.splitext(path)[1].lstrip("."))


def _draw(axes: Any, chart: Chart) -> None:
    colours = [colour_of(i) for i in range(len(chart.series))]
    if chart.kind == "bars":
        _draw_bars(axes, chart, colours)
    elif chart.kind == "stacked":
        axes.stackplot(chart.x, *chart.series.values(), labels=list(chart.series), colors=colours)
        axes.margins(0)
    else:
        for (name, values), colour in zip(chart.series.items(), colours, strict=True):
            axes.plot(chart.x, values, label=name, color=colour, linewidth=1.6)
        axes.margins(x=0)
    for mark in chart.marks:
        axes.axvline(mark, color="black", linewidth=0.8, linestyle=(0, (4, 3)))
    if chart.log:
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:,.0f}")
    else:
        axes.set_ylim(bottom=0)
    axes.set_title(chart.title, loc="left", fontsize=10)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.005, 1.0), frameon=False, fontsize=9)


def _draw_bars(axes: Any, chart: Chart, colours: Sequence[str]) -> None:
    places = np.arange(len(chart.x))
    width = 0.84 / len(chart.series)
    for i, (name, values) in enumerate(chart.series.items()):
        offset = (i - (len(chart.series) - 1) / 2) * width
        axes.bar(places + offset, values, width, label=name, color=colours[i])
    axes.set_xticks(places, chart.x, rotation=90 if len(chart.x) > _MOST_NAMES else 0)

"""Charts on a page, where ``drawing.js`` draws them, and in a picture."""

import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from megatron_hdp.files import new_file
from megatron_hdp.simulator.charts.chart import Chart, colour_of
from megatron_hdp.simulator.filling import text_of

_MOST_NAMES = 24  # of bars that stand upright below them
_SCALES = {"": 1.0, "s": 1.0, "bytes": 1e9, "share": 1e-2}
_NAMES = {"": "", "s": " (s)", "bytes": " (GB)", "share": " (%)"}
_NO_DATES = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}


def on_page(chart: Chart) -> dict[str, Any]:
    """A chart as ``drawing.js`` takes it."""
    return {**asdict(chart), "colours": colours_of(chart)}


def chart_places() -> dict[str, str]:
    """What stands for the places of a template that draws charts."""
    names = {"__STYLE__": "style.css", "__DRAWING__": "drawing.js"}
    return {place: text_of(__package__, name) for place, name in names.items()}


def colours_of(chart: Chart) -> list[str]:
    """One a series."""
    return list(chart.colours) or [colour_of(i) for i in range(len(chart.series))]


def draw(axes: Any, chart: Chart) -> None:
    """Draw a chart on matplotlib's axes."""
    colours = colours_of(chart)
    scale = _SCALES[chart.unit]
    if chart.kind == "piles":
        _draw_piles(axes, chart, colours, scale)
    elif chart.kind == "bars":
        _draw_bars(axes, chart, colours)
    elif chart.kind == "stacked":
        axes.stackplot(chart.x, *chart.series.values(), labels=list(chart.series), colors=colours)
        axes.margins(0)
    else:
        style = "steps-post" if chart.kind == "stairs" else "default"
        for (name, values), colour in zip(chart.series.items(), colours, strict=True):
            y = np.array(values, dtype=np.float64) / scale  # None becomes nan, a gap
            x = chart.own_x.get(name, chart.x)
            axes.plot(x, y, label=name, color=colour, linewidth=1.6, drawstyle=style)
        axes.margins(x=0)
        if chart.x and all(float(x).is_integer() for x in chart.x):
            axes.xaxis.get_major_locator().set_params(integer=True)
    for mark in chart.marks:
        axes.axvline(mark, color="black", linewidth=0.8, linestyle=(0, (4, 3)))
    for name, value in chart.limits.items():
        axes.axhline(value / scale, color="black", linestyle=(0, (4, 3)), label=name)
    if chart.log:
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:,.0f}")
    elif chart.kind != "piles":
        axes.set_ylim(bottom=0)
    if chart.x_end is not None and chart.kind != "piles":
        axes.set_xlim(0, chart.x_end)
    axes.set_title(chart.title, loc="left", fontsize=10)
    if chart.note:
        axes.annotate(
            chart.note,
            (1.0, 1.0),
            (0, 3),
            xycoords="axes fraction",
            textcoords="offset points",
            ha="right",
            va="bottom",
            fontsize=7,
            color="#555555",
        )
    axes.set_xlabel(chart.x_label + _NAMES[chart.x_unit])
    axes.set_ylabel(chart.y_label + (_NAMES[chart.unit] if chart.kind != "piles" else ""))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.005, 1.0), frameon=False, fontsize=9)


def save(figure: Any, path: str) -> None:
    """Write a picture; the same one gives the same bytes."""
    import matplotlib

    suffix = os.path.splitext(path)[1].lstrip(".")
    # the layout's solver leaves last bits to chance, and names in an SVG are hashes of places
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axes in figure.axes:
        axes.set_position([round(place, 6) for place in axes.get_position().bounds])
    salted = matplotlib.rc_context({"svg.hashsalt": "megatron-hdp"})
    with salted, new_file(path, durable=False) as temporary:
        figure.savefig(temporary, format=suffix, metadata=_NO_DATES.get(suffix))


def _draw_bars(axes: Any, chart: Chart, colours: Sequence[str]) -> None:
    places = np.arange(len(chart.x))
    width = 0.84 / len(chart.series)
    for i, (name, values) in enumerate(chart.series.items()):
        offset = (i - (len(chart.series) - 1) / 2) * width
        axes.bar(places + offset, values, width, label=name, color=colours[i])
    axes.set_xticks(places, chart.x, rotation=90 if len(chart.x) > _MOST_NAMES else 0)


def _draw_piles(axes: Any, chart: Chart, colours: Sequence[str], scale: float) -> None:
    places = np.arange(len(chart.x))
    parts = np.array(list(chart.series.values()), dtype=np.float64) / scale
    sums = parts.sum(axis=0)
    end = sums.max() if chart.x_end is None else chart.x_end / scale
    ends = np.minimum(parts.cumsum(axis=0), end)
    begins = np.concatenate([np.zeros((1, len(sums))), ends[:-1]])
    for name, begin, until, colour in zip(chart.series, begins, ends, colours, strict=True):
        axes.barh(places, until - begin, left=begin, label=name, color=colour)
    axes.set_xlim(0, 1.12 * end)
    for place, total in zip(places.tolist(), sums.tolist(), strict=True):
        text = f" {total:.4g}" if total <= end else f" {total:.4g}, cut"
        axes.text(min(total, end), place, text, va="center", fontsize=9)
    axes.set_yticks(places, chart.x)
    axes.invert_yaxis()

"""Charts as plain values, drawn on a page by ``page.js`` and in a picture by matplotlib."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from megatron_hdp.files import new_file

KINDS = ("lines", "stairs", "piles")
COLOURS = (  # ColorBrewer's Set2 and Dark2, light ones first
    *("#66c2a5", "#fc8d62", "#8da0cb", "#e78ac3", "#a6d854", "#ffd92f", "#e5c494", "#b3b3b3"),
    *("#1b9e77", "#d95f02", "#7570b3", "#e7298a", "#66a61e", "#e6ab02", "#a6761d", "#666666"),
)
_SCALES = {"": 1.0, "s": 1.0, "bytes": 1e9, "share": 1e-2}
_NAMES = {"": "", "s": " (s)", "bytes": " (GB)", "share": " (%)"}
_NO_DATES = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Series over one axis."""

    kind: str
    """``lines``, ``stairs`` that keep a value until the next place, or ``piles``: lying bars
    made of all series."""
    title: str
    x_label: str
    y_label: str
    x: Sequence[str] | Sequence[float] = ()
    """Names of piles, else places; they rise."""
    series: Mapping[str, Sequence[float | None]]
    """Values by name, one a place; None: there is none."""
    own_x: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Places of series that do not have those of ``x``."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """Values to compare with, by name."""
    colours: Sequence[str] = ()
    """Of the series; by default those of `COLOURS`, again from the first."""
    x_unit: str = ""
    """Of places: "s", or none."""
    unit: str = ""
    """Of values: "s", "bytes", "share" or none."""
    x_end: float | None = None
    """Where the axis of places ends; by default at the last one."""
    note: str = ""
    """A line below the title."""

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind
        assert {self.unit, self.x_unit} <= _NAMES.keys(), (self.x_unit, self.unit)
        for name, values in self.series.items():
            assert len(values) == len(self.own_x.get(name, self.x)), (self.title, name)


def on_page(chart: Chart) -> dict[str, Any]:
    """A chart as ``page.js`` takes it."""
    return {**asdict(chart), "colours": colours_of(chart)}


def colours_of(chart: Chart) -> list[str]:
    """One a series."""
    return list(chart.colours) or [COLOURS[i % len(COLOURS)] for i in range(len(chart.series))]


def draw(axes: Any, chart: Chart) -> None:
    """Draw a chart on matplotlib's axes."""
    colours = colours_of(chart)
    scale = _SCALES[chart.unit]
    if chart.kind == "piles":
        _draw_piles(axes, chart, colours, scale)
    else:
        style = "steps-post" if chart.kind == "stairs" else "default"
        for (name, values), colour in zip(chart.series.items(), colours, strict=True):
            y = np.array(values, dtype=np.float64) / scale  # None becomes nan, a gap
            x = chart.own_x.get(name, chart.x)
            axes.plot(x, y, label=name, color=colour, linewidth=1.6, drawstyle=style)
        axes.margins(x=0)
        if chart.x and all(float(x).is_integer() for x in chart.x):
            axes.xaxis.get_major_locator().set_params(integer=True)
    for name, value in chart.limits.items():
        axes.axhline(value / scale, color="black", linestyle=(0, (4, 3)), label=name)
    if chart.kind != "piles":
        axes.set_ylim(bottom=0)
        if chart.x_end is not None:
            axes.set_xlim(0, chart.x_end)
    axes.set_title(chart.title, loc="left", fontsize=10)
    if chart.note:
        axes.set_title(chart.note, loc="right", fontsize=7, color="#555555")
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

"""Draws one step of both runs as it was measured: static above HDP on one time scale."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from measured import Step, Stretch

from megatron_hdp.simulator.palette import Palette

WAIT, SYNC = "#d62d20", "#8c8c8c"
_TRAFFIC, _INK = "#4d4d4d", "#222222"
_ROW = 0.82  # of the distance between two ranks
Runs = dict[str, Step]


def draw(runs: Runs, title: str) -> Figure:
    """Return the picture.

    Args:
        runs: by what each is called, the same step of every run; the first one goes on top.
        title: over all of it.
    """
    degrees = [bar.degree for step in runs.values() for rank in step.ranks for bar in rank.compute]
    num_ranks = max(len(step.ranks) for step in runs.values())
    palette = Palette.of_degrees(np.array(degrees), num_ranks)
    height = 1.2 + len(runs) * (0.5 + 0.26 * num_ranks)
    figure = Figure(figsize=(11.0, height), dpi=120, layout="constrained")
    rows = figure.subplots(len(runs), 2, sharex="col", squeeze=False, width_ratios=(6, 1))
    for (times, traffic), (name, step) in zip(rows, runs.items(), strict=True):
        _draw_ranks(times, step, palette)
        _draw_traffic(traffic, step)
        times.set_title(f"{name}: {step.seconds:.2f} s", loc="left", fontsize=11, color=_INK)
    longest_s = max(step.traced_s for step in runs.values())
    most_mb = max(_ring_mb(step) for step in runs.values())
    rows[0, 0].set_xlim(0, longest_s)  # of all, the axes are shared
    rows[0, 1].set_xlim(0, 1.15 * most_mb or 1)
    rows[0, 1].set_title("ring traffic", fontsize=10, color=_INK)
    rows[-1, 0].set_xlabel("seconds since the step began")
    rows[-1, 1].set_xlabel("MB")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.legend(handles=_legend(palette), loc="outside lower left", ncols=3, fontsize=9)
    return figure


def _draw_ranks(axes: Axes, step: Step, palette: Palette) -> None:
    """A row a rank: micro-batches in the colour of their degree, waits over them, sync."""
    for row, rank in enumerate(step.ranks):
        for bar in rank.compute:
            colour = palette.colours[palette.index(bar.degree)]
            _bars(axes, row, [bar], colour, edgecolor="white", linewidth=0.4)
        _bars(axes, row, rank.waits, WAIT)
        _bars(axes, row, rank.sync, SYNC)
    axes.set_yticks(range(len(step.ranks)), [f"rank {rank}" for rank in range(len(step.ranks))])
    axes.set_ylim(len(step.ranks) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _bars(axes: Axes, row: int, stretches: Sequence[Stretch], colour: str, **style: object) -> None:
    spans = [(one.start_s, one.seconds) for one in stretches]
    axes.broken_barh(spans, (row - _ROW / 2, _ROW), facecolors=colour, **style)


def _draw_traffic(axes: Axes, step: Step) -> None:
    megabytes = _ring_mb(step)
    axes.barh(0, megabytes, 0.5, color=_TRAFFIC)
    words = {"textcoords": "offset points", "va": "bottom", "fontsize": 10, "color": _INK}
    axes.annotate(f"{megabytes:,.0f} MB", (0, -0.28), (4, 0), **words)
    axes.set_ylim(0.75, -0.75)
    axes.set_yticks([])
    axes.spines[["top", "right"]].set_visible(False)


def _ring_mb(step: Step) -> float:
    return step.metrics["ring_bytes"] / 1e6


def _legend(palette: Palette) -> list[Patch]:
    handles = []
    for colour, (least, most) in zip(palette.colours, palette.groups, strict=True):
        ranks = f"{least}" if least == most else f"{least} to {most}"
        handles.append(Patch(color=colour, label=f"sequences over {ranks} rank{'s' * (most > 1)}"))
    handles.append(Patch(color=WAIT, label="waiting for other ranks"))
    handles.append(Patch(color=SYNC, label="gradient sync, optimizer"))
    return handles

"""A plan's picture: a Gantt chart with one lane a rank, coloured by ring degree.

With pipeline stages a rank has a lane a stage, or the first stage's where there are many ranks; all
model chunks of a stage (virtual stages) are in its lane, named where there is room.
"""

import importlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_hdp.arrays import BoolArray, Float64Array, Int64Array
from megatron_hdp.planner import Evaluation, Plan
from megatron_hdp.simulator.charts import save
from megatron_hdp.simulator.palette import IDLE, LOCAL, MAKESPAN, Palette, is_dark, pale
from megatron_hdp.simulator.plan_bars import Chart, chart_of, default_title
from megatron_hdp.simulator.units import short

_MAX_LABELLED_ROWS = 32
_MAX_SEPARATE_ROWS = 128
_MIN_OUTLINED_SHARE = 0.01
_POINTS_A_CHARACTER = 4.8
_LABEL_POINTS = 7


def plot_plan(
    plan: Plan,
    evaluation: Evaluation,
    path: str | os.PathLike[str],
    title: str | None = None,
) -> None:
    """Draw a plan and write it to ``path``; its suffix gives the format (png, svg, pdf).

    The title is by default the strategy and its efficiency.

    Raises:
        ValueError: the suffix names no format, or the evaluation belongs to something else.
        ImportError: matplotlib is not installed.
    """
    figure_class = import_figure("a plan")
    chart = chart_of(plan, evaluation, _MAX_SEPARATE_ROWS)
    scale, unit = time_unit(evaluation.makespan_s)
    height = float(np.clip(1.6 + 0.42 * chart.num_rows, 3.2, 9.0))
    figure = figure_class(figsize=(13.0, height), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlim(0, evaluation.makespan_s / scale * 1.01 or 1.0)
    axes.set_ylim(chart.num_rows - 0.5, -0.5)

    palette = Palette.of_degrees(chart.bars.degree, plan.num_ranks)
    _draw_bars(axes, chart, evaluation.makespan_s, scale, palette)
    _draw_limits(axes, evaluation, scale, unit)
    if chart.num_rows <= _MAX_LABELLED_ROWS:
        has_chunks = evaluation.model_chunks > 1
        _label_bars(axes, figure, plan, chart, scale, palette, has_chunks=has_chunks)
    _draw_legend(axes, palette, evaluation, has_local=len(plan.local_sequences) > 0)
    _name_axes(axes, plan, chart, evaluation.model_chunks, unit)
    axes.set_title(title or default_title(plan, evaluation), loc="left", fontsize=11)
    save_as_named(figure, path)


def save_as_named(figure: Any, path: str | os.PathLike[str]) -> None:
    """Write a figure in the format that the suffix of the path gives.

    Raises:
        ValueError: it names none.
    """
    known = sorted(figure.canvas.get_supported_filetypes())
    if os.path.splitext(path)[1].lstrip(".") not in known:
        raise ValueError(f"picture {path}: expected a name that ends in .{', .'.join(known)}")
    save(figure, os.fspath(path))


def import_figure(what: str, instead: str = "") -> Any:
    """Return matplotlib's class of figures.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; says ``what`` needs it, and ``instead``
            of what, where there is another way.
    """
    try:
        return importlib.import_module("matplotlib.figure").Figure
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise ModuleNotFoundError(
            f"drawing {what} needs matplotlib, which is not installed: "
            f"pip install 'megatron-hdp[plot]'{instead}",
            name="matplotlib",
        ) from error


def time_unit(makespan_s: float) -> tuple[float, str]:
    """Return in seconds, and by name, the unit of a chart's time."""
    units = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
    return next((one for one in units if makespan_s >= one[0]), units[-1])


def _draw_bars(axes: Any, chart: Chart, makespan_s: float, scale: float, palette: Palette) -> None:
    bars = chart.bars
    every_row = np.arange(chart.num_rows)
    idle = np.zeros(chart.num_rows), np.full(chart.num_rows, makespan_s / scale)
    few = chart.num_rows <= _MAX_SEPARATE_ROWS
    add_rectangles(axes, every_row, *idle, IDLE, separate=few)
    pipelined = bool(bars.backward.any())
    ring_s = bars.start_s / scale, bars.ring_end_s / scale
    for is_backward in (False, True):
        of_pass = bars.backward == is_backward
        is_pale = pipelined and not is_backward
        add_bars(axes, chart.row, *ring_s, bars.degree, of_pass, palette, is_pale, separate=few)
        chosen = of_pass & (bars.own_end_s > bars.ring_end_s)
        start, stop = bars.ring_end_s[chosen] / scale, bars.own_end_s[chosen] / scale
        shade = pale(LOCAL) if is_pale else LOCAL
        add_rectangles(axes, chart.row[chosen], start, stop, shade, separate=few)
    if not few:
        _outline_rings(axes, chart, scale)


def add_bars(
    axes: Any,
    row: Int64Array,
    start: Float64Array,
    stop: Float64Array,
    degree: Int64Array,
    chosen: BoolArray,
    palette: Palette,
    is_pale: bool,
    *,
    separate: bool,
) -> None:
    """Draw the chosen bars in the colours of their degrees."""
    for (least, most), colour in zip(palette.groups, palette.colours, strict=True):
        mine = chosen & (degree >= least) & (degree <= most)
        shade = pale(colour) if is_pale else colour
        add_rectangles(axes, row[mine], start[mine], stop[mine], shade, separate=separate)


def legend_of(axes: Any, palette: Palette | None, entries: Sequence[tuple[str, str]]) -> None:
    """Name the colours of degrees, then others by name, then lines that have a label."""
    patch = importlib.import_module("matplotlib.patches").Patch
    of_degrees = () if palette is None else zip(palette.names, palette.colours, strict=True)
    named = [*of_degrees, *entries]
    patches = [patch(facecolor=colour, label=name) for name, colour in named]
    lines, _ = axes.get_legend_handles_labels()
    axes.legend(
        handles=[*patches, *lines],
        loc="upper left",
        bbox_to_anchor=(1.005, 1.0),
        frameon=False,
        fontsize=9,
        borderaxespad=0.0,
    )


def add_rectangles(
    axes: Any,
    row: Int64Array,
    start: Float64Array,
    stop: Float64Array,
    colour: Any,
    *,
    separate: bool,
) -> None:
    """Fill one rectangle a lane; thin lanes touch, for a gap would wash their colour out."""
    collections = importlib.import_module("matplotlib.collections")
    half = 0.42 if separate else 0.5
    axes.add_collection(
        collections.PolyCollection(
            _corners(start, row - half, stop, row + half),
            facecolors=[colour],
            edgecolors="white" if separate else "none",
            linewidths=0.6 if separate else 0.0,
            antialiaseds=separate,
            rasterized=not separate,
        )
    )


def _outline_rings(axes: Any, chart: Chart, scale: float) -> None:
    """Draw a thin border around neighbouring lanes of one ring, where it is tall enough."""
    collections = importlib.import_module("matplotlib.collections")
    bars = chart.bars
    order = np.lexsort((chart.row, bars.backward, bars.micro_batch))
    row, micro_batch, backward = (
        values[order] for values in (chart.row, bars.micro_batch, bars.backward)
    )
    new = (np.diff(micro_batch) != 0) | (backward[1:] != backward[:-1]) | (np.diff(row) != 1)
    begins = np.flatnonzero(np.concatenate([[True], new]))
    last = np.append(begins[1:], len(row)) - 1
    tall = row[last] - row[begins] >= _MIN_OUTLINED_SHARE * chart.num_rows
    begins, last = begins[tall], last[tall]
    start, stop = bars.start_s[order][begins] / scale, bars.ring_end_s[order][begins] / scale
    axes.add_collection(
        collections.PolyCollection(
            _corners(start, row[begins] - 0.5, stop, row[last] + 0.5),
            facecolors="none",
            edgecolors="white",
            linewidths=0.5,
        )
    )


def _corners(left: Any, top: Any, right: Any, bottom: Any) -> Float64Array:
    flat = np.stack([left, top, right, top, right, bottom, left, bottom], axis=1)
    return flat.astype(np.float64).reshape(-1, 4, 2)


def _draw_limits(axes: Any, evaluation: Evaluation, scale: float, unit: str) -> None:
    bound, makespan = evaluation.lower_bound_s / scale, evaluation.makespan_s / scale
    share = f"\n({bound / makespan:.3f} of the makespan)" if makespan else ""
    axes.axvline(makespan, color=MAKESPAN, label=f"makespan {makespan:.3f} {unit}")
    axes.axvline(bound, color="white", linewidth=3.0)  # so that the dashes show on dark bars
    axes.axvline(
        bound,
        color="black",
        linestyle=(0, (4, 3)),
        label=f"lower bound {bound:.3f} {unit}{share}",
    )


def _label_bars(
    axes: Any,
    figure: Any,
    plan: Plan,
    chart: Chart,
    scale: float,
    palette: Palette,
    *,
    has_chunks: bool,
) -> None:
    """Write what a bar's ring holds where the text fits: sequences, their tokens, the chunk."""
    figure.draw_without_rendering()
    box = axes.get_window_extent()
    points_a_second = box.width * 72 / figure.dpi / (axes.get_xlim()[1] * scale)
    bars = chart.bars
    width = (bars.ring_end_s - bars.start_s) * points_a_second
    for i in np.flatnonzero(width > 3 * _POINTS_A_CHARACTER).tolist():
        m = int(bars.micro_batch[i])
        sequences = plan.sequences[plan.sequence_offsets[m] : plan.sequence_offsets[m + 1]]
        tokens = short(int(plan.lengths[sequences].sum()))
        texts = [f"{len(sequences)} seq, {tokens}", tokens][len(sequences) < 2 :]
        if plan.parts_of_each[m] > 1:
            part = int(bars.part[i]) + 1
            texts = [f"part {part} of {plan.parts_of_each[m]}", f"part {part}", str(part)]
        if has_chunks:
            chunk = int(bars.chunk[i])
            texts = [*(f"{text}, chunk {chunk}" for text in texts), f"chunk {chunk}"]
        fitting = [text for text in texts if (len(text) + 1) * _POINTS_A_CHARACTER < width[i]]
        if not fitting:
            continue
        colour = palette.colours[palette.index(int(bars.degree[i]))]
        if bars.backward.any() and not bars.backward[i]:
            colour = pale(colour)
        axes.text(
            (bars.start_s[i] + bars.ring_end_s[i]) / 2 / scale,
            chart.row[i],
            fitting[0],
            ha="center",
            va="center",
            fontsize=_LABEL_POINTS,
            color="white" if is_dark(colour) else "black",
            bbox={"facecolor": colour, "edgecolor": "none", "pad": 0.6},
            zorder=3,
        )


def _draw_legend(axes: Any, palette: Palette, evaluation: Evaluation, *, has_local: bool) -> None:
    entries = [("local (whole sequences\non a ring member)", LOCAL)] if has_local else []
    if evaluation.pipeline_stages > 1:
        entries.append(("a forward is paler\nthan its backward", pale(palette.colours[-1])))
    legend_of(axes, palette, [*entries, (f"idle {evaluation.idle_share:.1%}", IDLE)])


def _name_axes(axes: Any, plan: Plan, chart: Chart, chunks: int, unit: str) -> None:
    axes.set_xlabel(f"time ({unit})")
    stages = chart.stages_a_rank
    if stages > 1:
        middle = (stages - 1) / 2
        of_chunks = f" of {chunks} chunks" if chunks > 1 else ""
        axes.set_ylabel(f"HDP rank ({stages} stages{of_chunks} each)")
        axes.set_yticks([rank * stages + middle for rank in range(plan.num_ranks)])
        axes.set_yticklabels([str(rank) for rank in range(plan.num_ranks)])
        for rank in range(1, plan.num_ranks):
            axes.axhline(rank * stages - 0.5, color="black", linewidth=0.5)
    else:
        axes.set_ylabel("HDP rank" + (", first stage" if chart.bars.backward.any() else ""))
        if plan.num_ranks <= _MAX_LABELLED_ROWS:
            axes.set_yticks(range(plan.num_ranks))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)

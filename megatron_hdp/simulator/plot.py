"""A plan's picture: a Gantt chart with one lane a rank, coloured by ring degree."""

import importlib
import os
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from megatron_hdp.planner import Evaluation, Plan
from megatron_hdp.simulator.lanes import Float64Array, Int64Array, Lanes, lanes_of

_IDLE_COLOUR = "#e4e4e4"
_LOCAL_COLOUR = "#f28e2b"
_MAKESPAN_COLOUR = "#c0392b"
_COLOUR_MAP = "YlGnBu"
_MAX_LEGEND_DEGREES = 8
_MAX_LABELLED_RANKS = 32
_MAX_SEPARATE_LANES = 128
_MIN_OUTLINED_SHARE = 0.01
_LUMINANCE = (0.299, 0.587, 0.114)
_POINTS_A_CHARACTER = 4.8
_LABEL_POINTS = 7


def plot_plan(
    plan: Plan,
    evaluation: Evaluation,
    path: str | os.PathLike[str],
    title: str | None = None,
) -> None:
    """Draw a plan and write it to ``path``; its suffix gives the format (png, svg, pdf).

    Args:
        plan: what to draw.
        evaluation: its times.
        path: picture file; written under another name and renamed when it is complete.
        title: first line; the strategy and its efficiency if not given.

    Raises:
        ValueError: the suffix names no format, or the evaluation belongs to something else.
        ImportError: matplotlib is not installed.
    """
    figure_class = _import_figure()
    lanes = lanes_of(plan, evaluation)
    scale, unit = _time_unit(evaluation.makespan_s)
    height = float(np.clip(1.6 + 0.42 * plan.num_ranks, 3.2, 9.0))
    figure = figure_class(figsize=(13.0, height), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlim(0, evaluation.makespan_s / scale * 1.01 or 1.0)
    axes.set_ylim(plan.num_ranks - 0.5, -0.5)

    palette = _Palette.of_degrees(lanes.degree, plan.num_ranks)
    _draw_bars(axes, plan, lanes, evaluation.makespan_s, scale, palette)
    _draw_limits(axes, evaluation, scale, unit)
    if plan.num_ranks <= _MAX_LABELLED_RANKS:
        _label_bars(axes, figure, plan, lanes, scale, palette)
    _draw_legend(axes, palette, has_local=len(plan.local_sequences) > 0)
    _name_axes(axes, plan, unit)
    axes.set_title(title or _default_title(plan, evaluation), loc="left", fontsize=11)
    _save(figure, os.fspath(path))


def _import_figure() -> Any:
    try:
        return importlib.import_module("matplotlib.figure").Figure
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise ModuleNotFoundError(
            "drawing a plan needs matplotlib, which is not installed: "
            "pip install 'megatron-hdp[plot]'",
            name="matplotlib",
        ) from error


def _time_unit(makespan_s: float) -> tuple[float, str]:
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if makespan_s >= scale:
            return scale, unit
    return 1e-6, "µs"


@dataclass(frozen=True)
class _Palette:
    """A colour for every ring degree, from light (few ranks) to dark (many)."""

    groups: tuple[tuple[int, int], ...]
    """Least and most degree of each colour."""
    colours: tuple[Any, ...]

    @classmethod
    def of_degrees(cls, degrees: Int64Array, num_ranks: int) -> Self:
        """Give each degree its colour, or each power of two when there are many degrees.

        One rank is always light and all ranks are always dark, so that plans can be compared.
        """
        present = np.unique(degrees)
        classes = np.arange(len(present))
        if len(present) > _MAX_LEGEND_DEGREES:
            classes = np.ceil(np.log2(present)).astype(np.int64)
        groups = [present[classes == c] for c in np.unique(classes)]
        colormap = importlib.import_module("matplotlib").colormaps[_COLOUR_MAP]
        return cls(
            groups=tuple((int(group[0]), int(group[-1])) for group in groups),
            colours=tuple(map(colormap, _shades(present[0], present[-1], num_ranks, len(groups)))),
        )

    def index(self, degree: int) -> int:
        return next(i for i, (_, most) in enumerate(self.groups) if degree <= most)


def _shades(least: int, most: int, num_ranks: int, number: int) -> Float64Array:
    """Return `number` shades between those of two degrees, far enough apart to be told apart."""
    first, last = 0.3 + 0.7 * np.log2([least, most]) / np.log2(max(num_ranks, 2))
    room = 0.1 * (number - 1)
    last = max(last, min(1.0, first + room))
    return np.linspace(max(0.3, min(first, last - room)), last, number)


def _draw_bars(
    axes: Any, plan: Plan, lanes: Lanes, makespan_s: float, scale: float, palette: _Palette
) -> None:
    every_rank = np.arange(plan.num_ranks)
    idle = np.zeros(plan.num_ranks), np.full(plan.num_ranks, makespan_s / scale)
    few = plan.num_ranks <= _MAX_SEPARATE_LANES
    _add_rectangles(axes, every_rank, *idle, _IDLE_COLOUR, separate=few)
    for (least, most), colour in zip(palette.groups, palette.colours, strict=True):
        chosen = (lanes.degree >= least) & (lanes.degree <= most)
        start, stop = lanes.start_s[chosen] / scale, lanes.ring_end_s[chosen] / scale
        _add_rectangles(axes, lanes.rank[chosen], start, stop, colour, separate=few)
    chosen = lanes.own_end_s > lanes.ring_end_s
    start, stop = lanes.ring_end_s[chosen] / scale, lanes.own_end_s[chosen] / scale
    _add_rectangles(axes, lanes.rank[chosen], start, stop, _LOCAL_COLOUR, separate=few)
    if not few:
        _outline_rings(axes, plan, lanes, scale)


def _add_rectangles(
    axes: Any,
    rank: Int64Array,
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
            _corners(start, rank - half, stop, rank + half),
            facecolors=[colour],
            edgecolors="white" if separate else "none",
            linewidths=0.6 if separate else 0.0,
            antialiaseds=separate,
            rasterized=not separate,
        )
    )


def _outline_rings(axes: Any, plan: Plan, lanes: Lanes, scale: float) -> None:
    """Draw a thin border around neighbouring lanes of one ring, where it is tall enough."""
    collections = importlib.import_module("matplotlib.collections")
    order = np.lexsort((lanes.rank, lanes.micro_batch))
    rank, micro_batch = lanes.rank[order], lanes.micro_batch[order]
    begins = np.flatnonzero(
        np.concatenate([[True], (np.diff(micro_batch) != 0) | (np.diff(rank) != 1)])
    )
    last = np.append(begins[1:], len(rank)) - 1
    tall = rank[last] - rank[begins] >= _MIN_OUTLINED_SHARE * plan.num_ranks
    begins, last = begins[tall], last[tall]
    start, stop = lanes.start_s[order][begins] / scale, lanes.ring_end_s[order][begins] / scale
    axes.add_collection(
        collections.PolyCollection(
            _corners(start, rank[begins] - 0.5, stop, rank[last] + 0.5),
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
    axes.axvline(makespan, color=_MAKESPAN_COLOUR, label=f"makespan {makespan:.3f} {unit}")
    axes.axvline(bound, color="white", linewidth=3.0)  # so that the dashes show on dark bars
    axes.axvline(
        bound, color="black", linestyle=(0, (4, 3)), label=f"lower bound {bound:.3f} {unit}"
    )


def _label_bars(
    axes: Any, figure: Any, plan: Plan, lanes: Lanes, scale: float, palette: _Palette
) -> None:
    """Write what a bar's ring holds where the text fits: sequences and their tokens."""
    figure.draw_without_rendering()
    box = axes.get_window_extent()
    points_a_second = box.width * 72 / figure.dpi / (axes.get_xlim()[1] * scale)
    width = (lanes.ring_end_s - lanes.start_s) * points_a_second
    for i in np.flatnonzero(width > 3 * _POINTS_A_CHARACTER).tolist():
        m = int(lanes.micro_batch[i])
        sequences = plan.sequences[plan.sequence_offsets[m] : plan.sequence_offsets[m + 1]]
        tokens = _short(int(plan.lengths[sequences].sum()))
        texts = [f"{len(sequences)} seq, {tokens}", tokens][len(sequences) < 2 :]
        fitting = [text for text in texts if (len(text) + 1) * _POINTS_A_CHARACTER < width[i]]
        if not fitting:
            continue
        colour = palette.colours[palette.index(int(lanes.degree[i]))]
        axes.text(
            (lanes.start_s[i] + lanes.ring_end_s[i]) / 2 / scale,
            lanes.rank[i],
            fitting[0],
            ha="center",
            va="center",
            fontsize=_LABEL_POINTS,
            color="white" if np.dot(colour[:3], _LUMINANCE) < 0.5 else "black",
            bbox={"facecolor": colour, "edgecolor": "none", "pad": 0.6},
            zorder=3,
        )


def _short(tokens: int) -> str:
    return f"{tokens / 1000:.3g}K" if tokens >= 1000 else str(tokens)


def _draw_legend(axes: Any, palette: _Palette, *, has_local: bool) -> None:
    patch = importlib.import_module("matplotlib.patches").Patch
    entries = []
    for (least, most), colour in zip(palette.groups, palette.colours, strict=True):
        name = f"degree {least}" if least == most else f"degree {least} to {most}"
        entries.append(patch(facecolor=colour, label=name))
    if has_local:
        entries.append(
            patch(facecolor=_LOCAL_COLOUR, label="local (whole sequences\non a ring member)")
        )
    entries.append(patch(facecolor=_IDLE_COLOUR, label="idle"))
    lines, _ = axes.get_legend_handles_labels()
    axes.legend(
        handles=[*entries, *lines],
        loc="upper left",
        bbox_to_anchor=(1.005, 1.0),
        frameon=False,
        fontsize=9,
        borderaxespad=0.0,
    )


def _name_axes(axes: Any, plan: Plan, unit: str) -> None:
    axes.set_xlabel(f"time ({unit})")
    axes.set_ylabel("HDP rank")
    if plan.num_ranks <= _MAX_LABELLED_RANKS:
        axes.set_yticks(range(plan.num_ranks))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _default_title(plan: Plan, evaluation: Evaluation) -> str:
    return (
        f"{plan.strategy}: {len(plan.lengths):,} sequences, {plan.lengths.sum():,} tokens on "
        f"{plan.num_ranks:,} ranks of {plan.tokens_per_rank:,} tokens, "
        f"efficiency {evaluation.efficiency:.3f}"
    )


def _save(figure: Any, path: str) -> None:
    suffix = os.path.splitext(path)[1].lstrip(".")
    known = sorted(figure.canvas.get_supported_filetypes())
    if suffix not in known:
        raise ValueError(f"picture {path}: expected a name that ends in .{', .'.join(known)}")
    temporary = f"{path}.tmp{os.getpid()}"
    try:
        figure.savefig(temporary, format=suffix)
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)

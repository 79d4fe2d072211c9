"""A picture of who encodes what: a lane a rank, a bar an item, one chart a plan."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_hdp.media import ItemBatch, ItemCostModel, ItemLanes, ItemPlan, item_lanes
from megatron_hdp.simulator.palette import IDLE, LOCAL, MAKESPAN
from megatron_hdp.simulator.plot import (
    add_rectangles,
    import_figure,
    legend_of,
    save_as_named,
    time_unit,
)

_HERE, _CUT = "#225ea8", "#7fcdbb"
_COLOURS = {
    "of this rank's sequences": _HERE,
    "of other ranks' sequences": LOCAL,
    "cut over several ranks": _CUT,
}
_MAX_SEPARATE = 64  # ranks
_MAX_BARS = 400  # more of them have no room for borders
_MAX_NAMED = 16


def plot_items(
    batch: ItemBatch,
    plans: Mapping[str, ItemPlan],
    cost: ItemCostModel,
    path: str | os.PathLike[str],
    title: str = "",
) -> None:
    """Draw plans of one batch below each other, by one clock.

    Args:
        batch: the items of a step.
        plans: of it, by what their charts are called.
        cost: of items.
        path: whose suffix gives the format (png, svg, pdf).
        title: of the picture.

    Raises:
        ValueError: the suffix names no format.
        ImportError: matplotlib is not installed.
    """
    figure_class = import_figure("a plan of items")
    lanes = {name: item_lanes(batch, plan, cost) for name, plan in plans.items()}
    longest_s = max(one.makespan_s for one in lanes.values())
    scale, unit = time_unit(longest_s)
    height = float(np.clip(0.9 + 0.2 * batch.num_ranks, 1.6, 4.0))
    figure = figure_class(figsize=(13.0, 0.5 + height * len(plans)), dpi=130, layout="constrained")
    charts = figure.subplots(len(plans), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, plan) in zip(charts, plans.items(), strict=True):
        _draw(axes, batch, plan, lanes[name], scale)
        axes.set_title(name, loc="left", fontsize=11)
        axes.set_xlim(0, longest_s / scale * 1.01 or 1.0)
    charts[-1].set_xlabel(f"time to encode a step's items ({unit})")
    is_cut = any(plan.is_cut.any() for plan in plans.values())
    named = [one for one in _COLOURS.items() if is_cut or one[1] != _CUT]
    legend_of(charts[0], None, [*named, ("waits", IDLE)])
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    save_as_named(figure, path)


def _draw(axes: Any, batch: ItemBatch, plan: ItemPlan, lanes: ItemLanes, scale: float) -> None:
    every = np.arange(batch.num_ranks)
    makespan = lanes.makespan_s / scale
    whole = np.zeros(len(every)), np.full(len(every), makespan)
    add_rectangles(axes, every, *whole, IDLE, separate=batch.num_ranks <= _MAX_SEPARATE)
    separate = batch.num_ranks <= _MAX_SEPARATE and len(lanes.item) <= _MAX_BARS
    is_cut = plan.is_cut[lanes.item]
    is_here = ~is_cut & (batch.consumers[lanes.item] == lanes.rank)
    chosen: Sequence[Any] = (is_here, ~is_here & ~is_cut, is_cut)
    for mine, colour in zip(chosen, _COLOURS.values(), strict=True):
        begin, end = lanes.start_s[mine] / scale, lanes.end_s[mine] / scale
        add_rectangles(axes, lanes.rank[mine], begin, end, colour, separate=separate)
    axes.axvline(makespan, color=MAKESPAN)
    axes.set_ylim(batch.num_ranks - 0.5, -0.5)
    axes.set_ylabel("rank")
    if batch.num_ranks <= _MAX_NAMED:
        axes.set_yticks(range(batch.num_ranks))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)

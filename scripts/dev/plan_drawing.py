"""What pictures of the docs have in common: a plan's bars, and text on them."""

from typing import Any

from megatron_hdp.planner import Evaluation, Plan
from megatron_hdp.simulator.palette import IDLE, Palette, is_dark, pale
from megatron_hdp.simulator.plan_bars import chart_of

WIDTH = 7.6
"""Inches, of every picture."""


def draw_plan(axes: Any, made: Plan, times: Evaluation, palette: Palette) -> None:
    """Draw a row for each stage of each rank, with the tokens of micro-batches or their parts."""
    chart = chart_of(made, times, max_rows=64)
    bars, stages = chart.bars, times.pipeline_stages
    axes.barh(range(chart.num_rows), times.makespan_s, 0.84, color=IDLE)
    for i in range(bars.num_bars):
        colour = palette.colours[palette.index(int(bars.degree[i]))]
        if stages > 1 and not bars.backward[i]:
            colour = pale(colour)
        start, width = bars.start_s[i], bars.own_end_s[i] - bars.start_s[i]
        axes.barh(chart.row[i], width, 0.84, start, color=colour, edgecolor="white", linewidth=0.5)
        sequences = list(made.micro_batch(int(bars.micro_batch[i])).sequences)
        if made.parts_of_each[bars.micro_batch[i]] > 1 and width > times.makespan_s / 60:
            write(axes, start + width / 2, chart.row[i], f"{bars.part[i] + 1}", colour)
        elif width > times.makespan_s / 16:
            text = f"{made.lengths[sequences].sum() / 1000:.3g}K"
            write(axes, start + width / 2, chart.row[i], text, colour)
    middle = [rank * stages + (stages - 1) / 2 for rank in range(made.num_ranks)]
    axes.set_yticks(middle, [f"rank {rank}" for rank in range(made.num_ranks)])
    for rank in range(1, made.num_ranks):
        axes.axhline(rank * stages - 0.5, color="black", linewidth=0.5 * (stages > 1))
    axes.set_ylim(chart.num_rows - 0.5, -0.5)
    bare(axes)


def write(axes: Any, x: float, y: float, text: str, colour: str, size: int = 7) -> None:
    """Write on something of this colour."""
    ink = "white" if is_dark(colour) else "black"
    axes.text(x, y, text, ha="center", va="center", color=ink, fontsize=size)


def bare(axes: Any) -> None:
    """Leave axes without a frame."""
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=8)

"""Draws how a job lost a rank and continued, of a trace (``--hdp-survive --hdp-trace``).

The first loss, and the next time that others joined, each from half a step before to a step behind.

``python scripts/dev/plot_lost_rank.py TRACE.json PICTURE.png``
"""

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megatron_hdp.simulator.palette import IDLE

WORK, WAIT, OPTIMIZER, LOST = "#225ea8", "#e6a19a", "#f0a830", "#c0392b"
WAY = {
    "leaves the step": "#54278f",
    "hears who is left": "#756bb1",
    "lets go of groups": "#bcbddc",
    "makes groups anew": "#41ab5d",
    "prepares the step": "#a1d99b",
}
WAITS = ("ring wait", "pipeline wait", "gradient sync")
BEFORE, BEHIND = 0.5, 1.0  # of a step
Event = dict[str, Any]


class Trace:
    """A trace by lanes.

    Raises:
        ValueError: no rank was lost in it.
    """

    def __init__(self, path: Path) -> None:
        events = json.loads(path.read_bytes())["traceEvents"]
        labels = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
        names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        self.members = {p: name for p, name in sorted(names.items()) if name != "job"}
        self.bars = [(labels[e["tid"]], e) for e in events if e["ph"] == "X"]
        self.steps = sorted(self.of_lane("steps"), key=lambda one: one["ts"])
        epochs = sorted(self.of_lane("epochs"), key=lambda one: one["ts"])
        losses = [i for i, one in enumerate(epochs) if one["args"]["lost"]]
        if not losses:
            raise ValueError(f"{path}: found no lost rank, expected a trace of a job that lost one")
        self.moments = [epochs[losses[0]]]
        joins = [one for one in epochs[losses[0] + 1 :] if one["args"]["joined"]]
        self.moments += joins[:1]

    def of_lane(self, lane: str) -> list[Event]:
        """The bars of one lane of all processes."""
        return [bar for name, bar in self.bars if name == lane]

    def span(self, epoch: Event) -> tuple[float, float]:
        """From when to when an epoch's beginning is drawn, in microseconds."""
        begins, ends = epoch["ts"], epoch["ts"] + epoch["dur"]
        before = max((one for one in self.steps if one["ts"] < begins), key=lambda one: one["ts"])
        behind = min((one for one in self.steps if one["ts"] >= ends), key=lambda one: one["ts"])
        first = max(before["ts"] + (1 - BEFORE) * before["dur"], 0.0)
        return first, behind["ts"] + BEHIND * behind["dur"]


def draw_moment(axes: Axes, trace: Trace, epoch: Event, scale: tuple[float, float]) -> None:
    """A row a member: what it did."""
    first, last = scale
    row_of = {process: row for row, process in enumerate(trace.members)}
    for lane, bar in trace.bars:
        start, end = max(bar["ts"], first), min(bar["ts"] + bar["dur"], last)
        colour, thin = colour_of(lane, bar)
        if colour is None or start >= end:
            continue
        row = row_of[bar["pid"]]
        axes.barh(row, (end - start) / 1e6, thin, (start - first) / 1e6, color=colour)
    for step in trace.steps:
        name = step["name"]
        again = any(
            one["args"]["lost"] and name == f"step {one['args']['behind_step'] + 1}"
            for one in trace.moments
        )
        middle = (max(step["ts"], first) + min(step["ts"] + step["dur"], last)) / 2
        if first < middle < last and step["ts"] < last and step["ts"] + step["dur"] > first:
            axes.text(
                (middle - first) / 1e6, -0.75, name + " again" * again, ha="center", fontsize=9
            )
        for edge in (step["ts"], step["ts"] + step["dur"]):
            if first <= edge <= last:
                axes.axvline((edge - first) / 1e6, color="black", linewidth=0.6, linestyle=":")
    axes.set_xlim(0, (last - first) / 1e6)
    axes.set_facecolor(IDLE)
    axes.set_xlabel("seconds")
    says(axes, trace, epoch, first, row_of)


def says(axes: Axes, trace: Trace, epoch: Event, first: float, row_of: dict[int, int]) -> None:
    """Words on what the picture shows."""
    begins, ends = (epoch["ts"] - first) / 1e6, (epoch["ts"] + epoch["dur"] - first) / 1e6
    about, seconds = epoch["args"], f"{epoch['dur'] / 1e6:.1f} s"
    step = about["behind_step"] + 1
    if not about["lost"]:
        for process in (process_of(trace, one) for one in about["joined"]):
            axes.text(begins, row_of[process], "joins ", ha="right", va="center")
        axes.set_title(f"another one joins behind step {step - 1}: {seconds}", loc="left")
        return
    for process in (process_of(trace, one) for one in about["lost"]):
        axes.plot(begins, row_of[process], "X", color=LOST, markersize=11)
        words = {"ha": "left", "va": "center", "color": LOST, "weight": "bold"}
        axes.text(begins, row_of[process], "   killed; what it did of the step is lost", **words)
    ended = max(one["ts"] + one["dur"] for one in trace.steps if one["ts"] < epoch["ts"])
    middle = ((ended - first) / 1e6 + begins) / 2
    axes.text(middle, -0.75, f"step {step}", ha="center", fontsize=9, color=LOST)
    axes.text((begins + ends) / 2, -0.75, "the others make groups anew", ha="center", fontsize=9)
    axes.set_title(f"a rank is lost in step {step}: {seconds} until it begins again", loc="left")


def process_of(trace: Trace, member: int) -> int:
    """The process of a member."""
    return next(p for p, name in trace.members.items() if name.split(",")[0] == f"member {member}")


def colour_of(lane: str, bar: Event) -> tuple[str | None, float]:
    """What is drawn of a bar, and how high."""
    if lane == "recovery":
        return WAY.get(bar["name"]), 0.8
    if lane.startswith("compute"):
        return WORK, 0.8
    if lane in WAITS:
        return WAIT, 0.8
    return (OPTIMIZER, 0.8) if lane == "optimizer step" else (None, 0.0)


def draw(trace: Trace, picture: Path) -> None:
    """Draw the loss and, beside it, the join."""
    spans = [trace.span(one) for one in trace.moments]
    widths = [last - first for first, last in spans]
    figure = Figure(figsize=(13.0, 1.8 + 0.42 * len(trace.members)), dpi=110, layout="constrained")
    grid = figure.subplots(1, len(spans), sharey=True, squeeze=False, width_ratios=widths)
    for axes, epoch, span in zip(grid[0], trace.moments, spans, strict=True):
        draw_moment(axes, trace, epoch, span)
    names = list(trace.members.values())
    grid[0][0].set_yticks(range(len(names)), names)
    grid[0][0].set_ylim(len(names) - 0.4, -1.1)
    legend = [Patch(color=WORK, label="computes"), Patch(color=WAIT, label="waits for others")]
    legend.append(Patch(color=OPTIMIZER, label="optimizer"))
    legend += [Patch(color=colour, label=name) for name, colour in WAY.items()]
    figure.legend(handles=legend, loc="outside lower center", ncols=8, fontsize=8)
    figure.savefig(picture)


def main(trace: str, picture: str) -> None:
    """Draw a trace."""
    draw(Trace(Path(trace)), Path(picture))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Draws the roles of docs/data-plane.md: ``python scripts/dev/plot_data_plane.py FOLDER``."""

import sys
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from megatron_hdp.simulator.palette import is_dark

WIDTH, HEIGHT = 7.6, 4.9  # inches, of the axes' units too
METADATA, TOKENS, WATCHES = "#8e44ad", "#225ea8", "#7f7f7f"
ROLES = {
    "host": "#7f7f7f",
    "planner": "#8e44ad",
    "constructor": "#225ea8",
    "source loader": "#41b6c4",
    "rank": "#f0a830",
}
"""And the colour of each."""
_NODE = "#f4f4f4"


def roles() -> Figure:
    """Two nodes of a job: who asks whom for what."""
    figure = Figure(figsize=(WIDTH, HEIGHT))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, WIDTH)
    axes.set_ylim(0, HEIGHT)
    axes.set_axis_off()
    for left, name in ((0.1, "node 0"), (4.4, "node 1")):
        _box(axes, left, 0.62, 3.1, 2.28, _NODE)
        _text(axes, left, 0.47, f"{name}: ranks ask by a socket and map shared memory", "left")
        _role(axes, left + 0.3, 1.72, 1.4, "constructor")
        for number in range(4):
            _role(axes, left + 0.2 + 0.7 * number, 0.75, 0.6, "rank")
            start = left + 0.5 + 0.7 * number, 1.17
            _arrow(axes, start, (left + 1.0, 1.7), TOKENS, both=True)
        _role(axes, left + 2.15, 1.72, 0.8, "host")
    _role(axes, 0.4, 4.05, 1.4, "planner")
    for number, name in enumerate(("web", "web", "code", "chat")):
        left = 2.5 + 1.28 * number
        _role(axes, left, 4.05, 1.18, "source loader", f"\nof {name}")
        for constructor in (1.1, 5.4):
            _arrow(axes, (left + 0.59, 4.03), (constructor, 2.16), TOKENS)
    for constructor in (1.0, 5.3):
        _arrow(axes, (1.1, 4.03), (constructor, 2.16), METADATA)
    _arrow(axes, (2.48, 4.26), (1.82, 4.26), METADATA)
    _arrow(axes, (2.6, 2.16), (1.5, 4.03), WATCHES, dashed=True)
    _arrow(axes, (2.7, 2.16), (3.1, 4.03), WATCHES, dashed=True)
    _arrow(axes, (2.25, 1.93), (1.82, 1.93), WATCHES, dashed=True)
    _arrow(axes, (6.55, 1.93), (6.12, 1.93), WATCHES, dashed=True)
    _text(axes, 0.1, 4.68, "one a job, on node 0", "left")
    _text(axes, 2.5, 4.68, "one or more a source, on any node", "left")
    legend = (
        (0.1, METADATA, "metadata: lengths, shares of a step"),
        (2.75, TOKENS, "tokens, each once a node"),
        (4.95, WATCHES, "starts and watches (all loaders too)"),
    )
    for left, colour, told in legend:
        axes.plot((left, left + 0.3), (0.16, 0.16), color=colour, linewidth=1.6)
        _text(axes, left + 0.38, 0.16, told, "left")
    return figure


def _role(axes: Any, left: float, bottom: float, width: float, name: str, more: str = "") -> None:
    colour = ROLES[name]
    _box(axes, left, bottom, width, 0.42, colour)
    ink = "white" if is_dark(colour) else "black"
    middle = left + width / 2, bottom + 0.21
    axes.text(*middle, name + more, ha="center", va="center", color=ink, fontsize=8)


def _box(axes: Any, left: float, bottom: float, width: float, height: float, colour: str) -> None:
    style = "round,pad=0,rounding_size=0.06"
    box = FancyBboxPatch((left, bottom), width, height, style, facecolor=colour, linewidth=0)
    axes.add_patch(box)


def _arrow(
    axes: Any,
    start: tuple[float, float],
    end: tuple[float, float],
    colour: str,
    both: bool = False,
    dashed: bool = False,
) -> None:
    line = {"color": colour, "linewidth": 0.9, "shrinkA": 0, "shrinkB": 0}
    line |= {"arrowstyle": "<->" if both else "->", "linestyle": "--" if dashed else "-"}
    axes.annotate("", xy=end, xytext=start, arrowprops=line)


def _text(axes: Any, x: float, y: float, text: str, side: str) -> None:
    axes.text(x, y, text, ha=side, va="center", color="black", fontsize=8)


def main(folder: str) -> None:
    """Draw the picture into a folder."""
    with matplotlib.rc_context({"svg.hashsalt": "data plane"}):
        path = Path(folder) / "data-plane.svg"
        roles().savefig(path, metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Draws one step of a trace (``--hdp-trace``): under each rank's plan what it did.

With several model chunks on a stage (virtual stages) each chunk has rows of its own. Of a
micro-batch in parts each part has a bar, ``3.1`` being the second part of micro-batch 3.

``python scripts/dev/plot_trace.py TRACE.json PICTURE.png [STEP]``; without a step the first one.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megatron_hdp.simulator.palette import IDLE, Palette, is_dark, pale

WAIT, SYNC, OPTIMIZER = "#c0392b", "#7f7f7f", "#f0a830"
COPIES = {"copy to the host": "#16a085", "copy to the device": "#8e44ad"}
COLOURS = COPIES | {
    "ring wait": WAIT,
    "pipeline wait": WAIT,
    "gradient sync": SYNC,
    "optimizer step": OPTIMIZER,
}
THIN = 0.4  # of a row, waits and copies; bars of the plan and of compute take twice as much
_CHUNK = ", chunk "
Event = dict[str, Any]


def read_step(
    path: Path, step: int | None
) -> tuple[Event, dict[int, str], list[tuple[str, Event]]]:
    """Return the step's own bar, the processes' names and (lane, bar) of all ranks.

    Raises:
        ValueError: the trace has no such step.
    """
    events = json.loads(path.read_bytes())["traceEvents"]
    labels = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    ranks = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    bars = [(labels[e["tid"]], e) for e in events if e["ph"] == "X"]
    steps = {int(bar["name"].split()[1]): bar for lane, bar in bars if lane == "steps"}
    if step is not None and step not in steps:
        raise ValueError(f"{path} has the steps {sorted(steps)}, not {step}")
    whole = steps[min(steps) if step is None else step]
    first, last = whole["ts"], whole["ts"] + whole["dur"]
    bars = [(lane, bar) for lane, bar in bars if first <= bar["ts"] <= last and lane != "steps"]
    return whole, {p: name for p, name in ranks.items() if name != "job"}, bars


def draw(whole: Event, ranks: dict[int, str], bars: list[tuple[str, Event]], picture: Path) -> None:
    """Draw the bars: two rows a chunk, waits low in the second one; one more for copies."""
    degrees = np.array([bar["args"].get("degree", 1) for lane, bar in bars if lane not in COLOURS])
    palette = Palette.of_degrees(degrees, len(ranks))
    copies = {COPIES[lane]: lane for lane, _ in bars if lane in COPIES}
    chunks = 1 + max(_chunk_of(lane, bar) for lane, bar in bars)
    rows = [
        what + (f", chunk {chunk}" if chunks > 1 else "")
        for chunk in range(chunks)
        for what in ("plan", "measured")
    ]
    rows += ["copies"] if copies else []
    row_of = {process: (len(rows) + 0.4) * i for i, process in enumerate(sorted(ranks))}
    height = 1.4 + 0.375 * len(rows) * len(ranks)
    figure = Figure(figsize=(13.0, height), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    for lane, bar in bars:
        chunk = _chunk_of(lane, bar)
        lane = lane.partition(_CHUNK)[0]
        row = row_of[bar["pid"]] + 2 * chunk + (lane != "plan")
        if lane in COPIES:
            row = row_of[bar["pid"]] + 2 * chunks
        start, width = (bar["ts"] - whole["ts"]) / 1e6, bar["dur"] / 1e6
        colour = COLOURS.get(lane)
        if colour is None:
            colour = palette.colours[palette.index(bar["args"].get("degree", 1))]
            colour = pale(colour) if bar["name"].startswith("forward") else colour
        edge = "white" if lane in ("plan", "compute") else "none"
        thin = THIN if lane in COLOURS else 2 * THIN
        at = row + THIN - thin / 2 - (THIN if lane == "copy to the host" else 0.0)
        axes.barh(at, width, thin, start, color=colour, edgecolor=edge, linewidth=0.5)
        is_labelled = lane == "plan" or ("part" in bar["args"] and lane not in COLOURS)
        if is_labelled and width > whole["dur"] / 1e6 / 40:
            ink = "white" if is_dark(colour) else "black"
            label = ".".join(
                str(bar["args"][one]) for one in ("micro_batch", "part") if one in bar["args"]
            )
            axes.text(start + width / 2, at, label, ha="center", va="center", color=ink, fontsize=7)
    ticks = [row + offset for row in row_of.values() for offset in range(len(rows))]
    axes.set_yticks(ticks, [f"{ranks[p]}, {what}" for p in row_of for what in rows])
    axes.set_ylim(max(ticks) + 0.6, -0.6)
    axes.set_xlim(0, whole["dur"] / 1e6)
    axes.set_facecolor(IDLE)
    axes.set_xlabel("seconds since the step began")
    legend = [Patch(color=c, label=n) for c, n in zip(palette.colours, palette.names, strict=True)]
    legend += [Patch(color=WAIT, label="waiting for others"), Patch(color=SYNC, label="sync")]
    legend.append(Patch(color=OPTIMIZER, label="optimizer"))
    legend += [Patch(color=colour, label=lane) for colour, lane in copies.items()]
    figure.legend(handles=legend, loc="outside lower center", ncols=8, fontsize=8)
    stretched = whole["args"]["plan_stretched_by"]
    axes.set_title(f"{whole['name']}; the plan x {stretched:.2f}", loc="left", fontsize=10)
    figure.savefig(picture)


def _chunk_of(lane: str, bar: Event) -> int:
    """The model chunk whose row a bar is in."""
    return int(lane.partition(_CHUNK)[2] or bar["args"].get("chunk", 0))


def main(trace: str, picture: str, step: str | None = None) -> None:
    """Draw a step of a trace."""
    draw(*read_step(Path(trace), None if step is None else int(step)), Path(picture))


if __name__ == "__main__":
    main(*sys.argv[1:])

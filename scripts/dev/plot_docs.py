"""Draws pictures of the docs: ``python scripts/dev/plot_docs.py FOLDER``.

Mesh, pipelines, virtual stages and the README's are real plans, timed by the cost model; ring and
offload are diagrams whose numbers are computed here; the data plane's is drawn by hand.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Patch, Rectangle
from plan_drawing import WIDTH, bare, draw_plan, write
from plot_media import items

from megatron_hdp.cli.checking import cost_model_of, job_of, preset_batch
from megatron_hdp.data.presets import preset_lengths
from megatron_hdp.megatron.options import parse_arguments, virtual_stage_choices
from megatron_hdp.planner import LLAMA_7B, Evaluation, Plan, evaluate, plan
from megatron_hdp.simulator.palette import IDLE, Palette, pale
from megatron_hdp.simulator.plan_bars import lanes_of
from megatron_hdp.simulator.plot import add_rectangles

_ROOT = Path(__file__).parents[2]
MEMBERS = ("#225ea8", "#41b6c4", "#7fcdbb", "#f0a830")  # of a ring of four
TO_HOST, TO_DEVICE = "#16a085", "#8e44ad"
METADATA, TOKENS, WATCHES = "#8e44ad", "#225ea8", "#7f7f7f"  # of the data plane
ROLES = {
    "host": "#7f7f7f",
    "keeper": "#b5b5b5",
    "planner": "#8e44ad",
    "constructor": "#225ea8",
    "source loader": "#41b6c4",
    "rank": "#f0a830",
}
"""Of the data plane, and the colour of each."""
TAIL = (
    *(8000, 8000, 6000, 5000, 4000, 4000, 3000, 3000),
    *(2000, 2000, 2000, 1500, 1500, 1000, 1000, 800),
)


def mesh() -> Figure:
    """The same sequences on eight ranks, planned by the mesh and by HDP."""
    strategies = {"static": "the static mesh", "dp-balance": "HDP"}
    return _strategies(strategies, (32000, 16000, *TAIL), ranks=8, stages=1)


def pipelines() -> Figure:
    """The same sequences on four ranks of four stages."""
    strategies = {"static": "the static mesh", "pp-balance": "HDP"}
    return _strategies(strategies, (16000, 16000, *TAIL) * 2, ranks=4, stages=4)


def parts() -> Figure:
    """One long sequence among short ones on two ranks of four stages: whole, and in parts."""
    lengths = [16_000, *[1000] * 48]
    cost_model = dataclasses.replace(LLAMA_7B, num_layers=8)
    asked = {"ranks": 2, "tokens_per_rank": 8192, "pipeline_stages": 4, "cost_model": cost_model}
    plans = {
        name: plan(lengths, **asked, sequence_parts=number)
        for name, number in {"whole": 1, "in parts": 8}.items()
    }
    palette = Palette.of_degrees(np.array([1, 2]), 2)
    figure = Figure(figsize=(WIDTH, 4.4), layout="constrained")
    for axes, (name, made) in zip(figure.subplots(2, sharex=True), plans.items(), strict=True):
        times = evaluate(made, cost_model, 4)
        draw_plan(axes, made, times, palette)
        told = f"{name}: {times.makespan_s:.2f} s, {times.idle_share:.0%} idle"
        axes.set_title(told, loc="left", fontsize=10)
    axes.set_xlabel("seconds, by the cost model; numbers are parts", fontsize=9)
    legend = [
        Patch(color=colour, label=label)
        for colour, label in zip(
            palette.colours, ("short ones, 1 rank", "the long one"), strict=True
        )
    ]
    legend += [Patch(color=pale(palette.colours[-1]), label="paler: forward")]
    legend += [Patch(color=IDLE, label="idle")]
    figure.legend(handles=legend, loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    return figure


def _strategies(
    strategies: Mapping[str, str], lengths: Sequence[int], ranks: int, stages: int
) -> Figure:
    plans = [
        plan(lengths, ranks=ranks, tokens_per_rank=8192, strategy=name, pipeline_stages=stages)
        for name in strategies
    ]
    degrees = np.unique(np.concatenate([np.diff(made.rank_offsets) for made in plans]))
    palette = Palette.of_degrees(degrees, ranks)
    figure = Figure(figsize=(WIDTH, 1.6 + 0.21 * 2 * ranks * stages), layout="constrained")
    all_axes = figure.subplots(len(plans), sharex=True)
    for axes, made, name in zip(all_axes, plans, strategies.values(), strict=True):
        times = evaluate(made, LLAMA_7B, stages)
        draw_plan(axes, made, times, palette)
        told = f"{name}: {times.makespan_s:.2f} s, {times.idle_share:.0%} idle"
        axes.set_title(told, loc="left", fontsize=10)
    all_axes[-1].set_xlabel("seconds, by the cost model", fontsize=9)
    legend = [
        Patch(color=colour, label="1 rank" if least == 1 else f"a ring of {least}")
        for colour, (least, _) in zip(palette.colours, palette.groups, strict=True)
    ]
    legend.append(Patch(color=IDLE, label="idle"))
    if stages > 1:
        legend.append(Patch(color=pale(palette.colours[-1]), label="paler: forward"))
    figure.legend(handles=legend, loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    return figure


def ring() -> Figure:
    """A sequence on four ranks: its chunks, their share of the causal area, the steps."""
    figure = Figure(figsize=(WIDTH, 4.3), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(1, 4.2))
    owner = [0, 1, 2, 3, 3, 2, 1, 0]  # of each chunk
    chunks = figure.add_subplot(grid[0, :])
    for chunk, member in enumerate(owner):
        _cell(chunks, chunk, 0, MEMBERS[member], f"chunk {chunk}\nmember {member}")
    _frame(chunks, 8, 1, "a sequence on four ranks: eight chunks, two for each member")
    area = figure.add_subplot(grid[1, 0])
    blocks = [0.0] * 4
    for query, member in enumerate(owner):
        for key in range(query + 1):
            blocks[member] += 0.5 if key == query else 1.0
            _cell(area, key, query, MEMBERS[member], half=key == query)
    assert len(set(blocks)) == 1  # every member has the same part of the triangle
    _frame(area, 8, 8, f"queries (down) see keys: {blocks[0]:g} blocks each")
    steps = figure.add_subplot(grid[1, 1])
    for member in range(4):
        for step in range(4):
            of = (member - step) % 4
            _cell(steps, step, member, MEMBERS[of], f"K, V of {of}\n{_seen(member, of)}")
    _frame(steps, 4, 4, "keys and values travel, queries stay")
    middles = [i + 0.5 for i in range(4)]
    steps.set_xticks(middles, [f"step {i}" for i in range(4)])
    steps.set_yticks(middles, [f"member {i}" for i in range(4)])
    return figure


def _seen(member: int, of: int) -> str:
    """Which of a member's queries see which keys of another."""
    if of == member:
        return "causal"
    return "all queries,\nfirst chunk" if of < member else "last queries,\nboth chunks"


def _cell(axes: Any, x: int, y: int, colour: str, text: str = "", half: bool = False) -> None:
    if half:  # a block on the diagonal: keys up to the query
        axes.fill([x, x, x + 1], [y, y + 1, y + 1], color=colour, linewidth=0)
    else:
        axes.add_patch(Rectangle((x, y), 1, 1, facecolor=colour, edgecolor="white"))
    write(axes, x + 0.5, y + 0.5, text, colour)


def _frame(axes: Any, columns: int, rows: int, title: str) -> None:
    axes.set_xlim(0, columns)
    axes.set_ylim(rows, 0)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_title(title, loc="left", fontsize=10)
    bare(axes)


def offload(layers: int = 6, ratio: float = 0.5) -> Figure:
    """A micro-batch's layers, their copies, and what stays on the device."""
    figure = Figure(figsize=(WIDTH, 3.9), layout="constrained")
    lanes, memory = figure.subplots(2, sharex=True, height_ratios=(1, 1.25))
    end = 3 * layers
    for layer in range(layers):
        _bar(lanes, 0, layer, 1, pale("#225ea8"), f"F{layer + 1}")
        _bar(lanes, 0, end - 2 * (layer + 1), 2, "#225ea8", f"B{layer + 1}")
        if layer < layers - 2:
            _bar(lanes, 1, layer + 0.5, 1.2, TO_HOST, "")
            _bar(lanes, 2, end - 2 * (layer + 2), 1.2, TO_DEVICE, "")
    lanes.set_yticks(range(3), ["compute", "to the host", "to the device"])
    lanes.set_ylim(2.6, -0.6)
    lanes.set_title(f"{layers} layers, offload ratio {ratio:g}", loc="left", fontsize=10)
    bare(lanes)
    for share, colour, line in ((0.0, "#7f7f7f", "--"), (ratio, "#c0392b", "-")):
        moments, held = resident(layers, share)
        label = f"ratio {share:g}: {max(held):g} layers' activations at most"
        memory.plot(moments, held, label=label, color=colour, linestyle=line)
    memory.set_ylim(0, layers + 0.5)
    memory.set_ylabel("on the device", fontsize=9)
    memory.set_xlabel("time; a layer's backward takes twice its forward", fontsize=9)
    memory.set_xticks([])
    memory.legend(fontsize=8, frameon=False)
    memory.spines[["top", "right"]].set_visible(False)
    memory.tick_params(labelsize=8)
    return figure


def resident(layers: int, ratio: float) -> tuple[list[float], list[float]]:
    """Moments, and the layers' activations that are on the device then.

    A share of all layers but the last two goes; it is let go when the layer after next begins, and
    comes back while the layer behind it runs backward.
    """
    end = 3 * layers
    moments = np.linspace(0, end, 40 * end + 1)
    held = np.zeros_like(moments)
    for layer in range(layers):
        begins = end - 2 * (layer + 1)  # its backward
        kept = np.clip(moments - layer, 0, 1) - np.clip((moments - begins) / 2, 0, 1)
        if layer < layers - 2:
            is_away = (moments >= layer + 2) & (moments < begins)
            back = np.clip((moments - (begins - 2)) / 1.2, 0, 1)
            kept -= is_away * ratio * (1 - back)
        held += kept
    return moments.tolist(), np.round(held, 9).tolist()


def _bar(axes: Any, row: int, start: float, width: float, colour: str, text: str) -> None:
    axes.barh(row, width, 0.8, start, color=colour, edgecolor="white", linewidth=0.6)
    write(axes, start + width / 2, row, text, colour)


def roles() -> Figure:
    """Two nodes of a job: who asks whom for what."""
    height = 4.9  # inches, of the axes' units too
    figure = Figure(figsize=(WIDTH, height))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(0, height))
    axes.set_axis_off()
    for left, name in ((0.1, "node 0"), (4.4, "node 1")):
        _box(axes, left, 0.62, 3.1, 2.28, "#f4f4f4")
        _text(axes, left, 0.47, f"{name}: ranks ask by a socket and map shared memory")
        _role(axes, left + 0.3, 1.72, 1.4, "constructor")
        for number in range(4):
            _role(axes, left + 0.2 + 0.7 * number, 0.75, 0.6, "rank")
            start = left + 0.5 + 0.7 * number, 1.17
            _arrow(axes, start, (left + 1.0, 1.7), TOKENS, both=True)
        _role(axes, left + 2.15, 1.72, 0.8, "host")
        _role(axes, left + 2.4, 2.3, 0.6, "keeper", height=0.28)
        _arrow(axes, (left + 2.7, 2.3), (left + 2.7, 2.14), WATCHES, dashed=True)
    _role(axes, 0.4, 4.05, 1.4, "planner")
    for number, name in enumerate(("web", "web", "code", "chat")):
        left = 2.5 + 1.28 * number
        _role(axes, left, 4.05, 1.18, "source loader", f"\nof {name}")
        for constructor in (1.1, 5.4):
            _arrow(axes, (left + 0.59, 4.03), (constructor, 2.16), TOKENS)
    for constructor in (1.0, 5.3):
        _arrow(axes, (1.1, 4.03), (constructor, 2.16), METADATA)
    _arrow(axes, (2.48, 4.26), (1.82, 4.26), METADATA)
    _arrow(axes, (2.23, 2.1), (1.5, 4.03), WATCHES, dashed=True)
    _arrow(axes, (3.07, 2.0), (3.12, 4.03), WATCHES, dashed=True)
    _arrow(axes, (2.25, 1.93), (1.82, 1.93), WATCHES, dashed=True)
    _arrow(axes, (6.55, 1.93), (6.12, 1.93), WATCHES, dashed=True)
    _text(axes, 0.1, 4.68, "one a job, on node 0")
    _text(axes, 2.5, 4.68, "one or more a source, on any node")
    legend = (
        (0.1, METADATA, "metadata: lengths, shares of a step"),
        (2.75, TOKENS, "tokens, each once a node"),
        (4.95, WATCHES, "starts and watches (all loaders too)"),
    )
    for left, colour, told in legend:
        axes.plot((left, left + 0.3), (0.16, 0.16), color=colour, linewidth=1.6)
        _text(axes, left + 0.38, 0.16, told)
    return figure


def _role(
    axes: Any,
    left: float,
    bottom: float,
    width: float,
    name: str,
    more: str = "",
    height: float = 0.42,
) -> None:
    _box(axes, left, bottom, width, height, ROLES[name])
    write(axes, left + width / 2, bottom + height / 2, name + more, ROLES[name], 8)


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


def _text(axes: Any, x: float, y: float, text: str) -> None:
    axes.text(x, y, text, va="center", color="black", fontsize=8)


def readme() -> Figure:
    """A global batch like GitHub's on 64 ranks: the static mesh above HDP, one time scale."""
    ranks, capacity, exposing, longest_s = 64, 8192, "#d62728", 0.0
    all_tokens = ranks * capacity
    lengths = preset_lengths("github", num_tokens=4 * all_tokens, max_length=all_tokens, seed=3)
    figure = Figure(figsize=(9.0, 5.0), dpi=90, layout="constrained")
    all_axes = figure.subplots(2, sharex=True)
    palette = Palette.of_degrees(2 ** np.arange(7), ranks)
    strategies = {"static": "static DP x CP mesh", "auto": "HDP"}
    for axes, (strategy, name) in zip(all_axes, strategies.items(), strict=True):
        made = plan(lengths, ranks=ranks, tokens_per_rank=capacity, strategy=strategy)
        times = evaluate(made, LLAMA_7B)
        bars = lanes_of(made, times)
        exposed_s = np.minimum(times.exposed_s[bars.micro_batch], bars.ring_end_s - bars.start_s)
        for (least, most), colour in zip(palette.groups, palette.colours, strict=True):
            mine = (bars.degree >= least) & (bars.degree <= most)
            ends = bars.start_s[mine], bars.own_end_s[mine]
            add_rectangles(axes, bars.rank[mine], *ends, colour, separate=False)
        ends = bars.own_end_s - exposed_s, bars.own_end_s
        add_rectangles(axes, bars.rank, *ends, exposing, separate=False)
        axes.set(ylim=(ranks - 0.5, -0.5), ylabel="rank", yticks=(0, 31, 63), facecolor=IDLE)
        told = f"{name}: {times.makespan_s:.1f} s, efficiency {times.efficiency:.3f}"
        axes.set_title(told, loc="left")
        longest_s = max(longest_s, times.makespan_s)
        axes.spines[:].set_visible(False)
    axes.set_xlim(0, longest_s)  # of both
    axes.set_xlabel("seconds of one step, by the cost model for LLaMA-7B")
    legend = [
        Patch(color=palette.colours[palette.index(1)], label="sequences on one rank"),
        Patch(color=palette.colours[palette.index(ranks)], label="on rings, darker: wider"),
        Patch(color=exposing, label="ring traffic that compute does not hide"),
        Patch(color=IDLE, label="done, or waiting"),
    ]
    figure.legend(handles=legend, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure


SHOWN = 12
"""HDP ranks of the picture of virtual stages, of many."""


class Pictured(NamedTuple):
    """A plan, and when it runs what."""

    virtual_stages: int
    plan: Plan
    times: Evaluation

    @property
    def title(self) -> str:
        """What it took."""
        named = "virtual stages on each stage" if self.virtual_stages > 1 else "part on each stage"
        return (
            f"{self.virtual_stages} {named}: {self.times.makespan_s:.2f} s, "
            f"{self.times.idle_share:.0%} idle"
        )


def planned(virtual_stages: int, preset: str = "github") -> Pictured:
    """Plan a global batch of llama-70b-2m on 512 HDP ranks of two stages."""
    config = str(_ROOT / "configs" / "bytescale" / "llama-70b-2m.yaml")
    own = parse_arguments(["--config", config, "--hybrid-data-parallel"], needs_data=False)
    options = virtual_stage_choices(own)[virtual_stages]
    job = job_of(options, 8192)
    cost_model = cost_model_of(options, job)
    made = plan(
        preset_batch(options, preset),
        ranks=job.hdp_ranks,
        tokens_per_rank=job.tokens_per_rank,
        max_length=options.seq_length,
        slice_multiple=options.hdp_slice_multiple,
        cost_model=cost_model,
        strategy="pp-balance",
        pipeline_stages=job.stages,
        virtual_stages=job.model_chunks,
    )
    times = evaluate(made, cost_model, job.stages, job.model_chunks)
    return Pictured(virtual_stages, made, times)


def virtual_stages() -> Figure:
    """That batch with one part of the model on each stage, and with five."""
    return waves([planned(1), planned(5)])


def waves(pictured: Sequence[Pictured]) -> Figure:
    """Draw plans on one scale of time: a row a stage of a rank, all of its parts in it."""
    degrees = np.unique(np.concatenate([np.diff(one.plan.rank_offsets) for one in pictured]))
    palette = Palette.of_degrees(degrees, pictured[0].plan.num_ranks)
    stages = pictured[0].times.pipeline_stages
    rows = min(SHOWN, pictured[0].plan.num_ranks) * stages
    height = 1.2 + len(pictured) * (0.5 + 0.115 * rows)
    figure = Figure(figsize=(12.0, height), dpi=110, layout="constrained")
    all_axes = figure.subplots(len(pictured), sharex=True, squeeze=False)[:, 0]
    for axes, one in zip(all_axes, pictured, strict=True):
        _draw_waves(axes, one, palette)
    all_axes[-1].set_xlim(0, 1.005 * max(one.times.makespan_s for one in pictured))
    all_axes[-1].set_xlabel("seconds, by the cost model")
    legend = [
        Patch(color=colour, label=name)
        for colour, name in zip(palette.colours, palette.names, strict=True)
    ]
    legend.append(Patch(color=pale(palette.colours[-1]), label="paler: forward"))
    legend.append(Patch(color=IDLE, label="idle"))
    figure.legend(handles=legend, loc="outside lower center", ncols=9, fontsize=8, frameon=False)
    return figure


def _draw_waves(axes: Any, one: Pictured, palette: Palette) -> None:
    num_ranks, stages = one.plan.num_ranks, one.times.pipeline_stages
    ranks = np.linspace(0, num_ranks - 1, min(SHOWN, num_ranks)).round().astype(int)
    place = np.full(num_ranks, -1)
    place[ranks] = np.arange(len(ranks))
    every_row = np.arange(len(ranks) * stages)
    whole = np.full(len(every_row), one.times.makespan_s)
    add_rectangles(axes, every_row, 0 * whole, whole, IDLE, separate=True)
    for stage in range(stages):
        bars = lanes_of(one.plan, one.times, stage)
        for (least, most), colour in zip(palette.groups, palette.colours, strict=True):
            for backward in (False, True):
                mine = (place[bars.rank] >= 0) & (bars.backward == backward)
                mine &= (bars.degree >= least) & (bars.degree <= most)
                row = place[bars.rank[mine]] * stages + stage
                shade = colour if backward else pale(colour)
                ends = bars.start_s[mine], bars.own_end_s[mine]
                add_rectangles(axes, row, *ends, shade, separate=True)
    axes.set_ylim(len(every_row) - 0.5, -0.5)
    axes.set_yticks(
        np.arange(len(ranks)) * stages + (stages - 1) / 2, [f"{rank}" for rank in ranks]
    )
    axes.set_ylabel(f"HDP rank, {stages} stages each")
    axes.set_title(one.title, loc="left", fontsize=10)
    bare(axes)


PICTURES = {
    **{"concept-mesh.svg": mesh, "concept-ring.svg": ring, "concept-offload.svg": offload},
    **{"concept-pipelines.svg": pipelines, "pipeline-virtual.png": virtual_stages},
    **{"long-parts.svg": parts, "media-step.svg": items},
    **{"data-plane.svg": roles, "mesh-and-hdp.png": readme},
}


def main(folder: str) -> None:
    """Draw all pictures into a folder."""
    with matplotlib.rc_context({"svg.hashsalt": "docs"}):
        for name, draw in PICTURES.items():
            metadata = {"Date": None} if name.endswith(".svg") else {}
            draw().savefig(Path(folder) / name, metadata=metadata)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Draws a configuration's plan without and with virtual stages, one above the other.

``python scripts/dev/plot_pipelines.py configs/bytescale/llama-70b-2m.yaml --gpus 8192 --output
docs/pipeline-virtual.png`` made the picture of docs/concepts.md. Lengths are a preset's, times
those of the planner's evaluation; of many ranks some are shown, evenly spaced.
"""

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megatron_hdp.cli.checking import cost_model_of, job_of, preset_batch
from megatron_hdp.megatron.options import parse_arguments, virtual_stage_choices
from megatron_hdp.planner import Evaluation, Plan, evaluate, plan
from megatron_hdp.simulator.palette import IDLE, Palette, pale
from megatron_hdp.simulator.plan_bars import lanes_of
from megatron_hdp.simulator.plot import add_rectangles

SHOWN = 12
"""HDP ranks of a picture."""


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


def planned(config: str, gpus: int, virtual_stages: int, preset: str) -> Pictured:
    """Plan a configuration's global batch.

    Raises:
        ValueError: so many virtual stages cannot be.
    """
    own = parse_arguments(["--config", config, "--hybrid-data-parallel"], needs_data=False)
    choices = virtual_stage_choices(own)
    if virtual_stages not in choices:
        raise ValueError(
            f"--virtual-stages {virtual_stages}: the layers of {config} allow "
            f"{', '.join(map(str, choices)) or 'none'}"
        )
    options = choices[virtual_stages]
    job = job_of(options, gpus)
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


def draw(pictured: Sequence[Pictured]) -> Figure:
    """Draw plans on one scale of time: a row a stage of a rank, all of its parts in it."""
    degrees = np.unique(np.concatenate([np.diff(one.plan.rank_offsets) for one in pictured]))
    palette = Palette.of_degrees(degrees, pictured[0].plan.num_ranks)
    stages = pictured[0].times.pipeline_stages
    rows = min(SHOWN, pictured[0].plan.num_ranks) * stages
    height = 1.2 + len(pictured) * (0.5 + 0.115 * rows)
    figure = Figure(figsize=(12.0, height), dpi=110, layout="constrained")
    all_axes = figure.subplots(len(pictured), sharex=True, squeeze=False)[:, 0]
    for axes, one in zip(all_axes, pictured, strict=True):
        _draw(axes, one, palette)
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


def _draw(axes: Any, one: Pictured, palette: Palette) -> None:
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
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=8)


def main() -> None:
    """Draw the picture and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", help="YAML of Megatron's flags")
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--virtual-stages", default="1,5", help="of each plan, with commas")
    parser.add_argument("--preset", default="github", help="lengths: github or byted")
    parser.add_argument("--output", required=True, help="the picture")
    given = parser.parse_args()
    counts = [int(one) for one in given.virtual_stages.split(",")]
    pictured = [planned(given.config, given.gpus, count, given.preset) for count in counts]
    for one in pictured:
        print(f"{one.title}, efficiency {one.times.efficiency:.3f}")
    draw(pictured).savefig(given.output)


if __name__ == "__main__":
    main()

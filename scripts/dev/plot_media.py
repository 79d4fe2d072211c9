"""The picture of a step with pictures: by who encodes them, and when."""

import dataclasses

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from plan_drawing import WIDTH, draw_plan

from megatron_hdp.media import ItemBatch, ItemCostModel, dealt, gap_choices, plan_in_gaps
from megatron_hdp.planner import LLAMA_7B, evaluate, plan
from megatron_hdp.simulator.joined import joined_step
from megatron_hdp.simulator.palette import IDLE, Palette

ENCODING = ("#f6c97f", "#d9731a")  # for their rows, and again with a graph
WAYS = {
    "home": ("home", slice(1)),
    "all ranks, before and behind": ("step", slice(1)),
    "all ranks, in the gaps": ("step", slice(None)),
}
"""Of the picture of items: the strategy, and which choices of waves there are."""


def items() -> Figure:
    """A step with pictures on two ranks of four stages, by who encodes them, and when."""
    ranks, stages, number, patches = 2, 4, 8, np.tile([64, 256, 1024, 4096], 12)
    cost_model = dataclasses.replace(LLAMA_7B, a=0.0, num_layers=8)
    asked = {"ranks": ranks, "tokens_per_rank": 8192, "pipeline_stages": stages}
    made = plan([8192] * (ranks * number), **asked, cost_model=cost_model)
    times = evaluate(made, cost_model, stages)
    consumers, slots = dealt(patches, ranks, number)
    num_ranks = ranks * stages
    batch = ItemBatch(
        patches=patches, consumers=consumers, micro_batches=slots, num_ranks=num_ranks
    )
    idle_s = times.makespan_s * num_ranks - times.total_compute_s
    cost = ItemCostModel(patch_s=0.4 * idle_s / patches.sum())
    choices = gap_choices(made, times, slots)
    palette = Palette.of_degrees(np.array([1]), 1)
    figure = Figure(figsize=(WIDTH, 6.6), layout="constrained")
    all_axes = figure.subplots(len(WAYS), sharex=True)
    for axes, (name, (strategy, some)) in zip(all_axes, WAYS.items(), strict=True):
        planned_items = plan_in_gaps(batch, cost, choices[some], strategy)
        step = joined_step(made, times, *planned_items, cost)
        axes.barh(range(num_ranks), step.step_s, 0.84, color=IDLE)
        draw_plan(axes, made, step.times, palette)
        rows = np.arange(num_ranks).reshape(ranks, stages).T.ravel()  # of ranks of the job
        for spans, colour in zip((step.encoding_s, step.encoding_again_s), ENCODING, strict=True):
            for begin_s, end_s in spans:
                shape = {"color": colour, "edgecolor": "white", "linewidth": 0.5}
                axes.barh(rows, end_s - begin_s, 0.84, begin_s, **shape)
        more = step.step_s / times.makespan_s
        told = f"{name}: {step.step_s:.2f} s, {more:.2f} times a step of text alone"
        axes.set_title(told, loc="left", fontsize=10)
    axes.set_xlabel("seconds, by the exact schedule", fontsize=9)
    legend = [
        Patch(color=colour, label=label)
        for colour, label in zip(ENCODING, ("encode", "encode again"), strict=True)
    ]
    legend += [Patch(color=palette.colours[0], label="micro-batches, paler: forward")]
    legend += [Patch(color=IDLE, label="idle")]
    figure.legend(handles=legend, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure

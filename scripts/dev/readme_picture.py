"""Draws the README's picture: one global batch on the static mesh and under HDP, one time scale.

``python scripts/dev/readme_picture.py docs/mesh-and-hdp.png`` made it. Lengths are like GitHub's,
times those of the planner's evaluation for LLaMA-7B.
"""

import argparse

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megatron_hdp.data.presets import preset_lengths
from megatron_hdp.planner import LLAMA_7B, evaluate, plan
from megatron_hdp.simulator.palette import IDLE, Palette
from megatron_hdp.simulator.plan_bars import lanes_of
from megatron_hdp.simulator.plot import add_rectangles

RANKS, TOKENS_PER_RANK, SEED = 64, 8192, 3
EXPOSED = "#d62728"
NAMES = {"static": "static DP x CP mesh", "auto": "HDP"}


def main() -> None:
    """Draw the picture and print the efficiencies."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", help="the picture")
    lengths = preset_lengths(
        "github",
        num_tokens=4 * RANKS * TOKENS_PER_RANK,
        max_length=RANKS * TOKENS_PER_RANK,
        seed=SEED,
    )
    made = {
        name: plan(lengths, ranks=RANKS, tokens_per_rank=TOKENS_PER_RANK, strategy=name)
        for name in NAMES
    }
    times = {name: evaluate(one, LLAMA_7B) for name, one in made.items()}
    longest = max(one.makespan_s for one in times.values())
    degrees = np.concatenate([np.diff(one.rank_offsets) for one in made.values()])
    palette = Palette.of_degrees(degrees, RANKS)
    figure = Figure(figsize=(9.0, 5.0), dpi=90, layout="constrained")
    for axes, (name, one) in zip(figure.subplots(2, sharex=True), made.items(), strict=True):
        print(f"{NAMES[name]}: efficiency {times[name].efficiency:.3f}")
        bars = lanes_of(one, times[name])
        exposed = np.minimum(
            times[name].exposed_s[bars.micro_batch], bars.ring_end_s - bars.start_s
        )
        every_row, zero = np.arange(RANKS), np.zeros(RANKS)
        add_rectangles(axes, every_row, zero, zero + longest, IDLE, separate=False)
        for (least, most), colour in zip(palette.groups, palette.colours, strict=True):
            mine = (bars.degree >= least) & (bars.degree <= most)
            ends = bars.start_s[mine], (bars.own_end_s - exposed)[mine]
            add_rectangles(axes, bars.rank[mine], *ends, colour, separate=False)
        ends = bars.own_end_s - exposed, bars.own_end_s
        add_rectangles(axes, bars.rank, *ends, EXPOSED, separate=False)
        axes.set(xlim=(0, longest), ylim=(RANKS - 0.5, -0.5), ylabel="rank", yticks=(0, 31, 63))
        axes.set_title(
            f"{NAMES[name]}: {times[name].makespan_s:.1f} s, "
            f"efficiency {times[name].efficiency:.3f}",
            loc="left",
        )
        axes.spines[:].set_visible(False)
    axes.set_xlabel("seconds of one step, by the cost model for LLaMA-7B")
    legend = [
        Patch(color=palette.colours[palette.index(1)], label="sequences on one rank"),
        Patch(color=palette.colours[palette.index(RANKS)], label="on rings, darker: wider"),
        Patch(color=EXPOSED, label="ring traffic that compute does not hide"),
        Patch(color=IDLE, label="done, or waiting"),
    ]
    figure.legend(handles=legend, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(parser.parse_args().output)


if __name__ == "__main__":
    main()

"""The pictures of ``docs/reproduction.md``."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from megatron_hdp.simulator.palette import LOCAL, MAKESPAN, Palette

_DPI = 80
_PAPER, _THEIRS, _OURS = Palette.of_degrees(np.array([1, 16, 256]), 256).colours


def draw(found: dict[str, Any], folder: Path) -> None:
    """Write ``reproduction.png`` and ``reproduction-ablation.png``."""
    _bars(found["cells"], folder / "reproduction.png")
    _ladder(found["ablation"], folder / "reproduction-ablation.png")


def _bars(cells: list[dict[str, Any]], path: Path) -> None:
    contexts = sorted({cell["context"] for cell in cells})
    figure, axes = plt.subplots(len(contexts), 1, figsize=(10, 9), sharex=True)
    columns = (
        ("paper_balanced", "paper, balanced", _PAPER),
        ("bytescale", "algorithm 2, simulated", _THEIRS),
        ("auto", "ours (auto), simulated", _OURS),
    )
    for context, axis in zip(contexts, axes, strict=True):
        here = [cell for cell in cells if cell["context"] == context]
        places = np.arange(len(here))
        for number, (key, label, colour) in enumerate(columns):
            heights = [cell[key] for cell in here]
            axis.bar(places + 0.27 * (number - 1), heights, 0.27, color=colour, label=label)
        bounds = [cell["bound"] for cell in here]
        axis.scatter(
            places + 0.27, bounds, marker="_", s=60, color=MAKESPAN, label="bound", zorder=3
        )
        axis.set_ylabel(f"{context // 1024}K\nspeed-up")
        axis.axhline(1, color="#888888", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(loc="upper right", ncols=4, frameon=False, fontsize=9)
    names = [f"{cell['model'].split('-')[1].replace('b', 'B')}\n{cell['data']}" for cell in here]
    axes[-1].set_xticks(places, names, fontsize=9)
    figure.suptitle("Over the static mesh, in the paper and simulated with one set of constants")
    _save(figure, path)


def _ladder(ladder: list[dict[str, Any]], path: Path) -> None:
    figure, axis = plt.subplots(figsize=(7.5, 3.2))
    places = np.arange(len(ladder))
    for shift, key, label, colour in (
        (-0.2, "paper", "paper", _PAPER),
        (0.2, "simulated", "simulated", _THEIRS),
    ):
        for place, one in zip(places, ladder, strict=True):
            value = one[key]
            if value is None:
                continue
            ours = one["step"].startswith("auto")
            axis.bar(place + shift, value, 0.4, color=LOCAL if ours else colour)
            axis.text(place + shift, value, f"{value:.2f}", ha="center", va="bottom", fontsize=8)
        axis.bar(0, 0, color=colour, label=label)
    axis.bar(0, 0, color=LOCAL, label="ours, simulated")
    names = [one["step"].replace(" ", "\n", 1) for one in ladder]
    axis.set_xticks(places, names, fontsize=8)
    axis.set_ylabel("speed-up")
    axis.legend(frameon=False, fontsize=8, loc="upper left")
    axis.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=_DPI, metadata={"Software": None})
    plt.close(figure)

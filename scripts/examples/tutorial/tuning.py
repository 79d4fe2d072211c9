"""``python scripts/examples/tutorial/tuning.py FOLDER`` draws what three runs have learnt."""

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure

_RUNS = {
    "base": "documentation, all weights",
    "answers": "answers, adapters",
    "preferred": "preferences, adapters",
}
_INK, _SECOND = "#225ea8", "#c0392b"


def draw(folder: Path) -> Figure:
    """Returns the losses by steps, of preferences the margin of rewards beside them."""
    figure = Figure(figsize=(11.0, 3.4), dpi=120, layout="constrained")
    for axes, (run, title) in zip(figure.subplots(1, len(_RUNS)), _RUNS.items(), strict=True):
        steps = [json.loads(line) for line in (folder / f"{run}.jsonl").read_text().splitlines()]
        numbers = [step["step"] for step in steps]
        axes.plot(numbers, [step["loss"] for step in steps], color=_INK, label="loss")
        if run == "preferred":
            margins = [step["reward_margin"] for step in steps]
            axes.plot(numbers, margins, color=_SECOND, label="reward margin")
        axes.set_title(title, loc="left", fontsize=11)
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9)
        print(f"{title}: loss {steps[0]['loss']:.2f} to {steps[-1]['loss']:.2f}")
    return figure


def main(folder: Path) -> None:
    """Writes the picture beside the runs."""
    path = folder / "losses.png"
    draw(folder).savefig(path)
    print(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

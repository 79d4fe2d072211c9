"""``python scripts/examples/tutorial/report.py FOLDER``: what the three runs did, in a table."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_hdp.simulator.units import aligned

_RUNS = ("base", "more", "chat")


def rows(folder: Path) -> list[tuple[str, ...]]:
    """Return a row for each run and source: steps, tokens, share of the loss tokens, losses."""
    found = []
    for run in _RUNS:
        steps = [json.loads(line) for line in (folder / f"{run}.jsonl").read_text().splitlines()]
        for name in steps[-1]["sources"]:
            figures = [step["sources"][name] for step in steps]
            losses = [one["loss"] for one in figures if one["loss"] is not None]
            longest = f"{steps[0]['step']} to {steps[-1]['step']}"
            tokens, trained = _sum(figures, "tokens"), _sum(figures, "loss_tokens")
            found.append(
                (run, name, longest, f"{tokens:,}", f"{trained / max(tokens, 1):.0%}")
                + (f"{losses[0]:.2f}", f"{losses[-1]:.2f}")
            )
    return found


def _sum(figures: Sequence[dict[str, Any]], key: str) -> int:
    return sum(one[key] for one in figures)


def main(folder: Path) -> None:
    """Prints the table."""
    header = ("run", "source", "steps", "tokens", "trained", "first loss", "last loss")
    print(*aligned([header, *rows(folder)], texts=(0, 1)), sep="\n")
    print(f"Every step's figures by source: {folder}/*.jsonl, key sources.")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Cells and rows of Markdown tables, and the lines that say why a cell is empty or marked."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

NOT_RUN = "-"

_KIND_CHARACTERS = 40  # of a problem, numbers left out, that tell its kind


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One strategy on one batch."""

    case: str
    """Its name."""
    seed: int
    strategy: str
    problem: str | None = None
    """Why there is no plan, or which rule it breaks."""


def row(values: Sequence[str]) -> str:
    """Return a row."""
    return f"| {' | '.join(values)} |"


def head(names: Sequence[str]) -> list[str]:
    """Return the names of the columns and the line below them."""
    return [row(names), f"|{'---|' * len(names)}"]


def known(of: Sequence[Measured], name: str) -> list[float]:
    """The figures of that name, where there is a plan."""
    return [value for one in of if (value := getattr(one, name)) is not None]


def mark(of: Sequence[Measured]) -> str:
    """A star where some of the seeds have no plan, or one that breaks a rule."""
    return "*" if any(one.problem for one in of) else ""


def mean_and_worst(of: Sequence[Measured], name: str) -> str:
    """The mean of the figures, and the least."""
    figures = known(of, name)
    return f"{fmean(figures):.3f} ({min(figures):.3f}){mark(of)}" if figures else NOT_RUN


def notes(results: Sequence[Measured]) -> list[str]:
    """One line for each strategy and kind of problem, with the first problem of that kind."""
    kinds: dict[tuple[str, str], list[Measured]] = {}
    for result in results:
        if result.problem:
            kind = re.sub(r"[\d,]+", "", result.problem)[:_KIND_CHARACTERS]
            kinds.setdefault((result.strategy, kind), []).append(result)
    return [
        f"- {strategy}: {_num_batches(of)} of "
        f"{_num_batches([one for one in results if one.strategy == strategy])} batches, such as "
        f"{of[0].case}, seed {of[0].seed}: {of[0].problem}"
        for (strategy, _), of in kinds.items()
    ]


def _num_batches(of: Sequence[Measured]) -> int:
    return len({(result.case, result.seed) for result in of})

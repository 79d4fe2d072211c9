"""Rows of Markdown tables, and the lines that say why a cell is empty or marked."""

import re
from collections.abc import Sequence
from typing import Protocol

NOT_RUN = "-"

_KIND_CHARACTERS = 40  # of a problem, numbers left out, that tell its kind


class Noted(Protocol):
    """A result that may have a problem."""

    @property
    def case(self) -> str:
        """Its case's name."""

    @property
    def seed(self) -> int:
        """Of its batch."""

    @property
    def strategy(self) -> str:
        """That planned it."""

    @property
    def problem(self) -> str | None:
        """Why there is no plan, or which rule it breaks."""


def row(values: Sequence[str]) -> str:
    """Return a row."""
    return f"| {' | '.join(values)} |"


def head(names: Sequence[str]) -> list[str]:
    """Return the names of the columns and the line below them."""
    return [row(names), f"|{'---|' * len(names)}"]


def mark(of: Sequence[Noted]) -> str:
    """A star where some of the seeds have no plan, or one that breaks a rule."""
    return "*" if any(result.problem for result in of) else ""


def notes(results: Sequence[Noted]) -> list[str]:
    """One line for each strategy and kind of problem, with the first problem of that kind."""
    kinds: dict[tuple[str, str], list[Noted]] = {}
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


def _num_batches(of: Sequence[Noted]) -> int:
    return len({(result.case, result.seed) for result in of})

"""A pass over a step's answers that nothing learns from: what the model says of each of them.

Under ``kto`` a second one follows, over the step's answers behind prompts of others.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from megatron_hdp.data.mixture import Position
from megatron_hdp.data.steps import Amounts, Loaders, LocalLoaders, RankStep, Reader
from megatron_hdp.megatron.execution import RankOutcome
from megatron_hdp.megatron.step.left_out import without_corrupt
from megatron_hdp.megatron.step.preference import AnswerSums, AnswerTable, StepPreferences


@dataclass(frozen=True)
class HowToRun:
    """What a pass needs of the steps of a split."""

    forward: Callable[[RankStep, Amounts, AnswerSums], RankOutcome]
    """Runs a step forward only."""
    agree: Callable[[RankStep, Position, Loaders], RankStep]
    """Returns the step as every rank will run it."""
    share: Callable[[RankStep], None]
    """Gives tensor-parallel ranks what one of them has read."""
    agreement: Callable[[], AbstractContextManager[None]]
    """Notes where this rank may stand because another one has not come."""


class AnswerPass:
    """Runs the answers of steps forward; every rank must call it for the same steps."""

    def __init__(self, preferences: StepPreferences, reader: Reader, how: HowToRun) -> None:
        self._preferences = preferences
        self._how = how
        self._unrelated = None
        if preferences.unrelated is not None:
            self._unrelated = LocalLoaders(preferences.unrelated, reader)

    def expect(self, position: Position) -> None:
        """Begins to prepare what the step that begins at a position needs beside itself."""
        if self._unrelated is not None:
            self._unrelated.expect(position)

    def of(
        self, step: RankStep, amounts: Amounts, position: Position
    ) -> tuple[AnswerTable, RankOutcome]:
        """What the model says of the answers of a step, and how its own pass went.

        Args:
            step: agreed on and read.
            amounts: what is left of it.
            position: where it begins, with what its plan depends on.
        """
        found = AnswerSums(step.totals.sequences)
        outcome = self._how.forward(step, amounts, found)
        with self._how.agreement():
            table = self._preferences.table(step, found)
        if self._unrelated is None:
            return table, outcome
        other = self._how.agree(self._unrelated.get(position), position, self._unrelated)
        with self._how.agreement():
            without_corrupt(other)
            self._how.share(other)
        found = AnswerSums(other.totals.sequences)
        self._how.forward(other, other.totals.amounts, found)
        with self._how.agreement():
            unrelated = self._preferences.of_unrelated(other, found)
        return replace(table, unrelated=unrelated), outcome

    def close(self) -> None:
        """Ends the preparation of what will not run."""
        if self._unrelated is not None:
            self._unrelated.close()

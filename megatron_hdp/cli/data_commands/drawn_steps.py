"""The steps that a run will draw, summed up by phase of the schedule.

Only sums are kept, so that memory does not grow with the steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatron_hdp.arrays import Float64Array
from megatron_hdp.data.mixture import Corpus, Mixture, Position, Step


@dataclass
class Phase:
    """Steps that begin in one phase of the schedule."""

    number: int
    begin: Position
    end: Position
    amounts: Float64Array
    """By source, in the unit of the weights."""
    num_sequences: int = 0
    num_tokens: int = 0
    num_loss_tokens: int = 0
    longest: int = 0
    """Tokens of the longest sequence."""

    @property
    def num_steps(self) -> int:
        """Steps summed up."""
        return self.end.steps - self.begin.steps

    @property
    def mean_length(self) -> float:
        """Tokens of a sequence on average."""
        return self.num_tokens / max(self.num_sequences, 1)

    @property
    def shares(self) -> Float64Array:
        """Each source's share of what these steps drew."""
        return np.asarray(self.amounts / max(self.amounts.sum(), 1.0))

    def add(self, step: Step, amounts: Float64Array) -> None:
        """Add a step that begins where these end."""
        self.end = step.after
        self.amounts += amounts
        self.num_sequences += len(step)
        self.num_tokens += step.tokens
        self.num_loss_tokens += int(step.num_loss_tokens.sum())
        self.longest = max(self.longest, int(step.lengths.max()))


@dataclass
class Forecast:
    """What the steps of a run draw."""

    names: tuple[str, ...]
    steps_wanted: int
    phases: list[Phase]
    exhausted: dict[str, int | None]
    """By source: the step with which it ends, counted from 1."""
    without_loss: int | None
    """The first step without a token that carries loss: there the run stops."""

    @property
    def end(self) -> Position:
        """Where the run is after the last step."""
        return self.phases[-1].end

    @property
    def is_cut_short(self) -> bool:
        """Whether all sources end before the steps that are wanted."""
        return self.end.steps < self.steps_wanted


class Forecaster:
    """Draws the steps of a run."""

    def __init__(self, corpus: Corpus, mixture: Mixture, num_steps: int) -> None:
        """Set what is drawn, from the first step on."""
        self._corpus = corpus
        self._mixture = mixture
        self._num_steps = num_steps
        self._sources = len(corpus.sources)
        self._phases: list[Phase] = []
        self._exhausted: dict[str, int | None] = dict.fromkeys(corpus.names)
        self._without_loss: int | None = None

    def steps(self) -> Iterator[Step]:
        """Draw and count all steps, fewer where all sources end; yields each.

        Raises:
            ValueError: every source has ended before the first one.
        """
        position = Position()
        while position.steps < self._num_steps and not self._mixture.is_over(position):
            step = self._mixture.step(position)
            self._count(step)
            yield step
            position = step.after

    def forecast(self) -> Forecast:
        """Return the sums, once all steps are drawn."""
        return Forecast(
            self._corpus.names,
            self._num_steps,
            self._phases,
            self._exhausted,
            self._without_loss,
        )

    def _count(self, step: Step) -> None:
        before, after = step.before, step.after
        records = [(before.of(name), after.of(name)) for name in self._corpus.names]
        amounts = np.array([new.amount - old.amount for old, new in records], dtype=np.float64)
        self._phase(before).add(step, amounts)
        for source, (_, now) in zip(self._mixture.sources, records, strict=True):
            if self._exhausted[source.name] is None and source.stream.has_ended(now.rows):
                self._exhausted[source.name] = after.steps
        if self._without_loss is None and not step.num_loss_tokens.any():
            self._without_loss = after.steps

    def _phase(self, position: Position) -> Phase:
        schedule = self._corpus.schedule
        now = position.steps if schedule.unit == "steps" else position.tokens
        number = max(i for i, phase in enumerate(schedule.phases) if phase.begin <= now)
        if not self._phases or self._phases[-1].number != number:
            self._phases.append(Phase(number, position, position, np.zeros(self._sources)))
        return self._phases[-1]

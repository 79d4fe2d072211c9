"""What a run will draw: every step of it, drawn as the run draws them, and summed up.

Nothing is kept of a step but sums, by phase of the schedule and by stretch of steps for pictures,
so that memory does not grow with the steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from megatron_hdp.arrays import Float64Array
from megatron_hdp.data.mixture import Corpus, Mixture, Position, Step

_STRETCHES = 400  # about as many as a picture has places for
_SAMPLES = 4  # steps of a phase that are planned


@dataclass
class Sums:
    """Of some steps that follow each other."""

    begin: Position
    end: Position
    amounts: Float64Array
    """By source, in the unit of the weights."""
    num_sequences: int = 0
    num_tokens: int = 0
    num_loss_tokens: int = 0
    longest: int = 0
    """Tokens of the longest sequence."""

    @classmethod
    def since(cls, position: Position, num_sources: int) -> Self:
        """Begin with nothing."""
        return cls(position, position, np.zeros(num_sources))

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
        """Of the sources, of what these steps drew."""
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
class PhaseSums(Sums):
    """Of the steps that begin in one phase of the schedule."""

    number: int = 0
    """Of the phase."""
    samples: list[Position] = field(default_factory=list)
    """Where some of the steps begin, spread over them."""


@dataclass
class Forecast:
    """What the steps of a run draw."""

    names: tuple[str, ...]
    steps_wanted: int
    phases: list[PhaseSums]
    stretches: list[Sums]
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
        self._phases: list[PhaseSums] = []
        self._stretches: list[Sums] = []
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
        for phase in self._phases:
            phase.samples = _spread(phase.samples)
        return Forecast(
            self._corpus.names,
            self._num_steps,
            self._phases,
            self._stretches,
            self._exhausted,
            self._without_loss,
        )

    def _count(self, step: Step) -> None:
        before, after = step.before, step.after
        records = [(before.of(name), after.of(name)) for name in self._corpus.names]
        amounts = np.array([new.amount - old.amount for old, new in records], dtype=np.float64)
        phase = self._phase(before)
        phase.add(step, amounts)
        self._stretch(before).add(step, amounts)
        for source, (_, now) in zip(self._mixture.sources, records, strict=True):
            if self._exhausted[source.name] is None and source.stream.has_ended(now.rows):
                self._exhausted[source.name] = after.steps
        if self._without_loss is None and not step.num_loss_tokens.any():
            self._without_loss = after.steps

    def _phase(self, position: Position) -> PhaseSums:
        schedule = self._corpus.schedule
        now = position.steps if schedule.unit == "steps" else position.tokens
        number = max(i for i, phase in enumerate(schedule.phases) if phase.begin <= now)
        if not self._phases or self._phases[-1].number != number:
            self._phases.append(PhaseSums.since(position, self._sources))
        phase = self._phases[-1]
        phase.number = number
        _sample(phase, position)
        return phase

    def _stretch(self, position: Position) -> Sums:
        number = position.steps * _STRETCHES // max(self._num_steps, _STRETCHES)
        if len(self._stretches) <= number:
            self._stretches.append(Sums.since(position, self._sources))
        return self._stretches[-1]


def _sample(phase: PhaseSums, position: Position) -> None:
    """Keep positions at equal distances, which double whenever there are too many."""
    distance = 1
    kept = phase.samples
    if len(kept) > 1:
        distance = kept[1].steps - kept[0].steps
    if kept and position.steps - kept[-1].steps < distance:
        return
    kept.append(position)
    if len(kept) > 8 * _SAMPLES:
        del kept[1::2]


def _spread(positions: list[Position]) -> list[Position]:
    places = np.linspace(0, len(positions) - 1, min(_SAMPLES, len(positions)))
    return [positions[round(place)] for place in places.tolist()]

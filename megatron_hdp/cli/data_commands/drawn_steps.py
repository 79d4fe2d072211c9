"""The steps that a run will draw, summed up by phase of the schedule.

Only sums are kept, so that memory does not grow with the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from megatron_hdp.arrays import Float64Array, Int64Array
from megatron_hdp.data.mixture import Corpus, MediaSource, Mixture, Position, Step

_OF_SIZES = "height", "width", "frames", "part"


@dataclass(frozen=True)
class StepItems:
    """The items of a step, in the order of its sequences."""

    rows: Int64Array
    """Tokens that stand for each, ``[items]``."""
    sizes: Int64Array
    """Height, width and frames of each picture, video or sound, ``[files, 3]``; a video that is cut
    counts whole."""

    @classmethod
    def of(cls, corpus: Corpus, step: Step) -> StepItems:
        """Those of a step; nothing is read of their files."""
        columns: list[list[Int64Array]] = [[np.zeros(0, dtype=np.int64)] for _ in range(6)]
        for number, source in enumerate(corpus.sources):
            if not isinstance(source, MediaSource):
                continue
            here = np.flatnonzero(step.sources == number)
            counts, items = source.items_of(step.rows[here], step.lengths[here])
            records = source.media.items.records[items]
            found = (
                *(np.repeat(here, counts), source.media.rows[items]),
                *(records[name].astype(np.int64) for name in _OF_SIZES),
            )
            for column, part in zip(columns, found, strict=True):
                column.append(part)
        sequences, *others = (np.concatenate(one) for one in columns)
        order = np.argsort(sequences, kind="stable")
        rows, *sizes, parts = (one[order] for one in others)
        return cls(rows, np.stack(sizes, axis=1)[parts == 0])


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
    num_items: int = 0
    """Pictures, pairs of frames or sounds."""
    num_rows: int = 0
    """Tokens that stand for them."""

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

    def add_items(self, found: StepItems) -> None:
        """Add pictures of a step."""
        self.num_items += len(found.rows)
        self.num_rows += int(found.rows.sum())


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


@dataclass(frozen=True)
class Drawing:
    """What draws the steps of a run."""

    corpus: Corpus
    mixture: Mixture
    weights_at: Callable[[Position], tuple[float, ...] | None]
    """Of the sources for the step that begins at a position; None: those of the schedule."""

    def steps(self, num_steps: int) -> Iterator[Step]:
        """The steps of a run from the first one on, fewer where all sources end."""
        position = Position()
        while position.steps < num_steps:
            weights = self.weights_at(position)
            if self.mixture.is_over(position, weights):
                return
            step = self.mixture.step(position, weights)
            yield step
            position = step.after


def forecast(drawing: Drawing, num_steps: int, done: Callable[[], object]) -> Forecast:
    """Draw and count the steps of a run; ``done`` is called after each."""
    corpus, mixture = drawing.corpus, drawing.mixture
    found = Forecast(corpus.names, num_steps, [], dict.fromkeys(corpus.names), None)
    for step in drawing.steps(num_steps):
        before, after = step.before, step.after
        drawn = [after.of(name).amount - before.of(name).amount for name in corpus.names]
        phase = _phase(found.phases, corpus, before)
        phase.add(step, np.array(drawn, dtype=np.float64))
        if corpus.has_media:
            phase.add_items(StepItems.of(corpus, step))
        for source in mixture.sources:
            name = source.name
            if found.exhausted[name] is None and source.stream.has_ended(after.of(name).rows):
                found.exhausted[name] = after.steps
        if found.without_loss is None and not step.num_loss_tokens.any():
            found.without_loss = after.steps
        done()
    assert found.phases, "a source that has not begun has not ended"
    return found


def _phase(phases: list[Phase], corpus: Corpus, position: Position) -> Phase:
    """The phase of the schedule at a position, added if it is a new one."""
    schedule = corpus.schedule
    now = position.steps if schedule.unit == "steps" else position.tokens
    number = max(i for i, phase in enumerate(schedule.phases) if phase.begin <= now)
    if not phases or phases[-1].number != number:
        phases.append(Phase(number, position, position, np.zeros(len(corpus.sources))))
    return phases[-1]

"""Where a run is in its data: one small record, by source, from which it goes on exactly."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from megatron_hdp.data.order import UNNAMED, Continuation
from megatron_hdp.planner.online import SeenCosts

_SHOWN = 32  # steps whose losses a mixture sees


@dataclass(frozen=True)
class Drawn:
    """What has been drawn of one source since the start of training."""

    rows: int = 0
    """Rows of its sequence table drawn to their end, over all epochs."""
    offset: int = 0
    """Tokens of the next row that are drawn already: it was cut, and a step ended inside it."""
    amount: int = 0
    """In the unit of the weights: tokens, loss tokens or sequences."""
    owed: float = 0.0
    """Its share of all that was drawn, less what was drawn of it, in the same unit."""


@dataclass(frozen=True)
class SeenLosses:
    """What is known of the losses of a run.

    A mixture for step k sees those up to step ``k - behind`` and nothing newer, whoever asks and
    however much is known by then: so a step that is decided ahead is the one that would have been
    decided when it was due.
    """

    behind: int
    """Steps between a step and the latest one whose losses it may depend on, at least 2."""
    steps: int = 0
    """Steps of the run whose losses are known, or will never be."""
    by_step: tuple[tuple[int, Mapping[str, float]], ...] = ()
    """Of the latest of them, oldest first: number of the step, from 0, and the loss of each source
    that had loss tokens."""

    def covers(self, steps: int) -> bool:
        """Return whether all is known that the step behind so many steps may depend on."""
        return self.steps > steps - self.behind

    def before(self, steps: int) -> list[Mapping[str, float]]:
        """Return the losses that the step behind so many steps may depend on, oldest first."""
        latest = steps - self.behind
        earliest = latest - _SHOWN + 1
        return [losses for step, losses in self.by_step if earliest <= step <= latest]

    def with_step(self, step: int, losses: Mapping[str, float]) -> SeenLosses:
        """Return them with those of one more step, the latest; `step` counts from 0."""
        earliest = step - _SHOWN - 2 * self.behind  # steps that are decided once more see the same
        kept = [one for one in self.by_step if earliest <= one[0] < step]
        return replace(self, steps=step + 1, by_step=(*kept, (step, dict(losses))))

    def renamed(self, today: Mapping[str, str]) -> SeenLosses:
        """Return them under new names of some sources."""
        return replace(
            self,
            by_step=tuple(
                (step, {today.get(name, name): loss for name, loss in losses.items()})
                for step, losses in self.by_step
            ),
        )

    def to_record(self) -> dict[str, Any]:
        """Return them as plain values."""
        by_step = [[step, dict(losses)] for step, losses in self.by_step]
        return {"behind": self.behind, "steps": self.steps, "by_step": by_step}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> SeenLosses:
        """Return what `to_record` made a record of."""
        by_step = tuple((step, dict(losses)) for step, losses in record["by_step"])
        return cls(**{**record, "by_step": by_step})


@dataclass(frozen=True)
class Position:
    """What has been drawn since the start of training; a step is a function of it."""

    steps: int = 0
    sequences: int = 0
    """Of all sources; Megatron's consumed samples."""
    tokens: int = 0
    sources: Mapping[str, Drawn] = field(default_factory=dict)
    """By name. A source that was taken out of the run keeps its record: it may come back."""
    losses: SeenLosses | None = None
    """Of steps before; None where the mixture does not follow them."""
    without: tuple[str, ...] = ()
    """Sources that have failed: nothing more is drawn of them, as if they had ended."""
    costs: SeenCosts | None = None
    """What the run has learnt of its costs, by which steps are planned; None where it does not."""

    def of(self, name: str) -> Drawn:
        """Return the record of a source; nothing is drawn of one that has none."""
        return self.sources.get(name, Drawn())

    @property
    def is_decidable(self) -> bool:
        """Whether all is known that the step that begins here depends on."""
        seen = (one for one in (self.losses, self.costs) if one is not None)
        return all(one.covers(self.steps) for one in seen)

    def knowing(self, other: Position) -> Position:
        """Return it with what is known at another position of the steps before that one."""
        return replace(self, losses=other.losses, costs=other.costs)

    def following(self, behind: int | None) -> Position:
        """Return it for steps that follow losses, so many steps behind them; None: they do not."""
        if behind is None:
            return replace(self, losses=None)
        seen = self.losses or SeenLosses(behind)
        return replace(self, losses=replace(seen, behind=behind, steps=self.steps))

    def seeing(self, before: Position, losses: Mapping[str, float | None]) -> Position:
        """Return it with the losses of the step that began at `before`, if steps follow losses.

        None is that of a source without a loss token.
        """
        seen = before.losses
        if seen is not None:
            finite = {
                name: loss
                for name, loss in losses.items()
                if loss is not None and math.isfinite(loss)
            }
            seen = seen.with_step(before.steps, finite)
        return replace(self, losses=seen)

    def key(self) -> tuple[object, ...]:
        """Return what tells it from other positions, for a dictionary.

        What is known of steps before does not: what the step may depend on is the same in all that
        cover it.
        """
        drawn = (
            (name, one.rows, one.offset, one.amount, one.owed)
            for name, one in sorted(self.sources.items())
        )
        return self.steps, self.sequences, self.tokens, self.without, *drawn

    def to_record(self) -> dict[str, Any]:
        """Return it as plain values, for a checkpoint or a file."""
        record = asdict(replace(self, losses=None, costs=None))
        record["losses"] = None if self.losses is None else self.losses.to_record()
        if self.costs is None:
            del record["costs"]  # releases before it was there can read the rest
        else:
            record["costs"] = self.costs.to_record()
        return record

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Position:
        """Return what `to_record` made a record of."""
        sources = {name: Drawn(**one) for name, one in record["sources"].items()}
        losses = record.get("losses")
        costs = record.get("costs")
        known = {
            "sources": sources,
            "losses": None if losses is None else SeenLosses.from_record(losses),
            "costs": None if costs is None else SeenCosts.from_record(costs),
            # releases before it was there knew none
            "without": tuple(record.get("without", ())),
        }
        return cls(**{**record, **known})

    @classmethod
    def of_one_source(
        cls, name: str, sequences: int, *, steps: int = 0, tokens: int = 0
    ) -> Position:
        """Return where a run of a single source is that never cut a row."""
        return cls(steps, sequences, tokens, {name: Drawn(rows=sequences, amount=tokens)})


def position_of_run(
    record: Mapping[str, Any] | None,
    goes_on: Continuation,
    steps: int,
    sequences: int,
    tokens: int,
) -> Position:
    """Return where a run that goes on is in its data, under today's names of its sources.

    Sources that had failed are tried again: each goes on where it stopped. A checkpoint of a
    release before mixtures, which drew from one source, has no record.

    Sources that had failed are tried again: each goes on where it stopped.
    """
    if record is not None:
        found = Position.from_record(record)
    else:
        found = Position.of_one_source(UNNAMED, sequences, steps=steps, tokens=tokens)
    today = {old: name for name, old in goes_on.names_before.items()}
    return replace(
        found,
        sources={today.get(name, name): one for name, one in found.sources.items()},
        losses=None if found.losses is None else found.losses.renamed(today),
        without=(),
    )

"""Losses by source of the latest steps, which a mixture may follow: part of a run's position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

_SHOWN = 32  # steps that a mixture sees


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

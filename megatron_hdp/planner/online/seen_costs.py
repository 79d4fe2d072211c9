"""What a run has learnt of its costs, by the step at which it learnt it: part of its position."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import orjson

from megatron_hdp.planner.online.filter import Corrections, FilterState

_KEPT_STEPS = 64  # steps that are planned once more see the same


@dataclass(frozen=True)
class SeenCosts:
    """The corrections of a run.

    Step k is planned by those that were found by step ``k - behind`` and nothing newer, whoever
    plans it and however much is known by then: so a step that is planned ahead is the one that
    would have been planned when it was due.
    """

    behind: int
    """Steps between a step and the latest one that its plan may depend on, at least 2."""
    steps: int = 0
    """Steps of the run that were observed, or will never be."""
    changes: tuple[tuple[int, Corrections], ...] = ()
    """Oldest first: the step, from 0, behind which corrections were found, and these."""
    num_changes: int = 0
    """Changes since the start of the run."""
    filter: FilterState | None = None
    """What the next change is found by; plans do not need it."""

    def covers(self, steps: int) -> bool:
        """Whether all is known that the plan of the step behind so many steps may depend on."""
        return self.steps > steps - self.behind

    def at(self, steps: int) -> Corrections:
        """The corrections by which the step behind so many steps is planned."""
        known = [one for step, one in self.changes if step <= steps - self.behind]
        return known[-1] if known else Corrections()

    def with_step(self, step: int, state: FilterState, corrections: Corrections) -> Self:
        """These with what one more step, the latest, has shown; `step` counts from 0."""
        before = [one for one in self.changes if one[0] < step]
        old = [one for one in before if one[0] < step - _KEPT_STEPS]
        changes = (*old[-1:], *before[len(old) :])
        is_new = corrections != (changes[-1][1] if changes else Corrections())
        return replace(
            self,
            steps=step + 1,
            changes=(*changes, (step, corrections)) if is_new else changes,
            num_changes=self.num_changes + is_new,
            filter=state,
        )

    def for_plans(self) -> Self:
        """These without what no plan depends on."""
        return replace(self, filter=None)

    def fingerprint(self) -> int:
        """64 bits over all of it, the same in every process."""
        data = orjson.dumps(self.to_record(), option=orjson.OPT_SORT_KEYS)
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")

    def to_record(self) -> dict[str, Any]:
        """These as plain values."""
        return {
            "behind": self.behind,
            "steps": self.steps,
            "changes": [[step, one.to_record()] for step, one in self.changes],
            "num_changes": self.num_changes,
            "filter": None if self.filter is None else self.filter.to_record(),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """What `to_record` made a record of."""
        changes = tuple((step, Corrections.from_record(one)) for step, one in record["changes"])
        state = record["filter"]
        state = None if state is None else FilterState.from_record(state)
        return cls(**{**record, "changes": changes, "filter": state})

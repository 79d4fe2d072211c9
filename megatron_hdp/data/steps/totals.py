"""What every rank must know of a whole step: sums, borders, fingerprints; some hundred bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import xxhash

from megatron_hdp.arrays import Int64Array
from megatron_hdp.data.mixture import Position, Step
from megatron_hdp.data.steps.settings import PlannedStep


@dataclass(frozen=True, kw_only=True)
class Amounts:
    """Sums over a step's sequences."""

    tokens: int
    squared_tokens: int
    """Sum of the squares of their lengths."""
    seen_in_window: int
    """The same of layers with a window: twice the pairs of query and key within it."""
    loss_tokens: int
    source_tokens: tuple[int, ...]
    """Tokens of each source."""
    source_loss_tokens: tuple[int, ...]
    window: int | None = None
    """Tokens that a query sees there."""

    @classmethod
    def of(cls, step: Step, num_sources: int, window: int | None = None) -> Amounts:
        """Return those of a step."""

        def by_source(amounts: Int64Array) -> tuple[int, ...]:
            found = np.zeros(num_sources, dtype=np.int64)
            np.add.at(found, step.sources, amounts)
            return tuple(found.tolist())

        return cls(
            tokens=step.tokens,
            squared_tokens=int((step.lengths**2).sum()),
            seen_in_window=int(_seen(step.lengths, window).sum()),
            loss_tokens=int(step.num_loss_tokens.sum()),
            source_tokens=by_source(step.lengths),
            source_loss_tokens=by_source(step.num_loss_tokens),
            window=window,
        )

    def without(self, source: int, length: int, num_loss_tokens: int) -> Amounts:
        """Return what is left when a sequence is taken out."""

        def less(sums: tuple[int, ...], amount: int) -> tuple[int, ...]:
            return tuple(one - amount if i == source else one for i, one in enumerate(sums))

        return replace(
            self,
            tokens=self.tokens - length,
            squared_tokens=self.squared_tokens - length**2,
            seen_in_window=self.seen_in_window - int(_seen(np.array([length]), self.window)[0]),
            loss_tokens=self.loss_tokens - num_loss_tokens,
            source_tokens=less(self.source_tokens, length),
            source_loss_tokens=less(self.source_loss_tokens, num_loss_tokens),
        )


def _seen(lengths: Int64Array, window: int | None) -> Int64Array:
    if window is None:
        return lengths**2
    inside = np.minimum(lengths, window)
    found: Int64Array = inside * (2 * lengths - inside)
    return found


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """What all ranks know of a planned step."""

    before: Position
    """Where it begins."""
    after: Position
    """Where the next one begins."""
    sequences: int
    amounts: Amounts
    micro_batches_min: int
    """Micro-batches of the rank that runs the fewest."""
    micro_batches_max: int
    efficiency: float
    """What the plan promises."""
    makespan_s: float
    """How long it says that the step takes until gradient sync."""
    planning_ms: float
    fingerprints: Mapping[str, int]
    """Of its sequences and its plan: ranks that run it compare them."""
    failure: str | None
    """Why the plan is the static one instead of the strategy's."""
    without: Mapping[str, str] = field(default_factory=dict)
    """Sources that have failed and that nothing is drawn of any more, and why."""

    @classmethod
    def of(
        cls,
        planned: PlannedStep,
        num_sources: int,
        without: Mapping[str, str] | None = None,
        window: int | None = None,
    ) -> StepTotals:
        """Return those of a planned step."""
        step, plan = planned.step, planned.plan
        counts = np.bincount(plan.ranks, minlength=plan.num_ranks)
        sequences = [one.tobytes() for one in (step.sources, step.rows, step.starts)]
        return cls(
            before=step.before,
            after=step.after,
            sequences=len(step),
            amounts=Amounts.of(step, num_sources, window),
            micro_batches_min=int(counts.min()),
            micro_batches_max=int(counts.max()),
            efficiency=float(plan.summary["efficiency"]),
            makespan_s=float(plan.summary["makespan_s"]),
            planning_ms=float(plan.summary["planning_ms"]),
            fingerprints={
                "sequences of the step": _fingerprint(*sequences),
                "sequence lengths": _fingerprint(step.lengths.tobytes()),
                "plan": plan.fingerprint(),
            },
            failure=planned.failure,
            without=dict(without or {}),
        )

    def to_record(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> StepTotals:
        """Return what `to_record` made a record of."""
        borders = {name: Position.from_record(record[name]) for name in ("before", "after")}
        sums = record["amounts"]
        sums = {name: tuple(one) if isinstance(one, list) else one for name, one in sums.items()}
        return cls(**{**record, **borders, "amounts": Amounts(**sums)})


def _fingerprint(*parts: bytes) -> int:
    found = xxhash.xxh3_64()
    for part in parts:
        found.update(part)
    return found.intdigest()

"""What a split draws from: sources, their weights and longest sequences, which may change.

A schedule is read at the beginning of a step and holds for the whole of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_hdp.data.mixture.position import Position
from megatron_hdp.data.spec import PrimitivesSpec, SourceSpec
from megatron_hdp.files import Say

WEIGHT_UNITS = ("tokens", "loss-tokens", "sequences")
SPLITS = ("train", "valid", "test")
_TOKENS = re.compile(r"([0-9]+(?:\.[0-9]+)?)([KMBT])", re.IGNORECASE)
_FACTORS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True, kw_only=True)
class Phase:
    """What holds from a point of the run on."""

    begin: int = 0
    """Steps or tokens drawn before it."""
    end: int = 0
    """Until here, weights and length change linearly from those of the phase before; with `begin`,
    they change at once."""
    weights: Mapping[str, float] | None = None
    """By source; one that is not named has weight 0. None: those of the phase before, in the first
    phase the sources' sizes."""
    max_length: int | None = None
    """Tokens of the longest sequence. None: that of the phase before, in the first one
    ``--seq-length``."""


@dataclass(frozen=True)
class Setting:
    """What holds at one step."""

    weights: tuple[float, ...]
    """Of the sources, in their order; they sum to 1."""
    max_length: int


@dataclass(frozen=True)
class Schedule:
    """Phases in the order in which they begin; the first begins at 0."""

    unit: str = "steps"
    phases: tuple[Phase, ...] = (Phase(),)

    def resolved(self, sizes: Mapping[str, float], max_length: int) -> ResolvedSchedule:
        """Fill in what was left out: the sources' sizes as weights, ``--seq-length`` as length.

        Raises:
            ValueError: a phase allows longer sequences than ``--seq-length``.
        """
        weights, longest = sizes, max_length
        settings = []
        for phase in self.phases:
            weights = weights if phase.weights is None else phase.weights
            longest = longest if phase.max_length is None else phase.max_length
            if longest > max_length:
                raise ValueError(
                    f"max-length of the schedule's phase from {phase.begin:,}: found {longest:,}, "
                    f"expected at most --seq-length {max_length:,}: lower the one or raise the "
                    "other"
                )
            parts = [float(weights.get(name, 0.0)) for name in sizes]
            settings.append(Setting(normalised(parts), longest))
        return ResolvedSchedule(self.unit, self.phases, tuple(settings))


@dataclass(frozen=True, kw_only=True)
class MixtureSpec:
    """The sources of one split."""

    sources: tuple[SourceSpec, ...]
    origin: str
    """The file or flag that says it, for messages."""
    schedule: Schedule = Schedule()
    weight_unit: str = "tokens"
    """What a weight is a share of."""
    split: str = "1"
    """Weights of training, validation and test, by which each source's documents are cut."""
    part: int = 0
    """Which of these three this is."""
    held_out: Mapping[str, int] = field(default_factory=dict)
    """By source: sequences at its end that validation takes and training leaves."""
    takes_held_out: bool = False
    """Whether those are what this split takes, and nothing else."""
    primitives: PrimitivesSpec = PrimitivesSpec()
    """Functions of the user's own in the place of those that decide steps."""

    def tell_code(self, say: Say) -> None:
        """Tell whose code is run for the steps, if any is."""
        if named := self.primitives.named:
            words = ", ".join(f"{key}: {place}" for key, place in named.items())
            say(f"runs the code that {self.origin} names: {words}")


@dataclass(frozen=True)
class ResolvedSchedule:
    """A schedule that knows every weight and length."""

    unit: str
    phases: tuple[Phase, ...]
    settings: tuple[Setting, ...]
    """What each phase leads to."""

    def at(self, position: Position) -> Setting:
        """Return what holds for the step that begins at a position."""
        now = position.steps if self.unit == "steps" else position.tokens
        number = max(i for i, phase in enumerate(self.phases) if phase.begin <= now)
        phase, target = self.phases[number], self.settings[number]
        if now >= phase.end or number == 0:
            return target
        before = self.settings[number - 1]
        share = (now - phase.begin) / (phase.end - phase.begin)
        weights = [
            (1 - share) * one + share * other
            for one, other in zip(before.weights, target.weights, strict=True)
        ]
        length = before.max_length + int(share * (target.max_length - before.max_length))
        return Setting(normalised(weights), length)

    def least_max_length(self, source: int) -> int:
        """Return the shortest bound of a sequence where a source has a weight."""
        lengths = []
        for number, setting in enumerate(self.settings):
            before = self.settings[max(0, number - 1)]
            if setting.weights[source] > 0:
                lengths.append(setting.max_length)
            if self.phases[number].end > self.phases[number].begin and (
                before.weights[source] > 0 or setting.weights[source] > 0
            ):
                lengths += [before.max_length, setting.max_length]
        return min(lengths, default=self.settings[-1].max_length)


def amount_of(text: str) -> tuple[int, str]:
    """Return a point of the run and its unit: ``50000`` steps, ``2B`` tokens.

    Raises:
        ValueError: neither.
    """
    if re.fullmatch(r"[0-9]{1,15}", text):
        return int(text), "steps"
    found = _TOKENS.fullmatch(text)
    if found is None:
        raise ValueError(
            f"found {text!r}, expected a number of steps such as 50000, or of tokens such as 2B "
            "(K, M, B, T)"
        )
    return round(float(found[1]) * _FACTORS[found[2].upper()]), "tokens"


def normalised(weights: Sequence[float]) -> tuple[float, ...]:
    """Return weights, of which one is above 0, as shares that sum to 1."""
    largest = max(weights)
    scaled = [weight / largest for weight in weights]  # a sum of them stays finite
    total = sum(scaled)
    return tuple(weight / total for weight in scaled)

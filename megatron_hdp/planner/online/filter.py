"""Learns from the times of all ranks: a pure function of what is known and one more step.

A window of the latest steps is fitted anew after each (``fitting``). What is found counts only when
it is far from what is in force, by more than the noise of the window explains, in several steps one
after the other: so noise does not move plans, and what moves them is a rounded number.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np

from megatron_hdp.arrays import Float64Array
from megatron_hdp.planner.cost_model import CostModel
from megatron_hdp.planner.online.fitting import Fit, fit, work

COLUMNS = ("attention_s", "linear_s", "micro_batches", "seconds")
"""Of an observation: what a rank ran in a step by the cost model that the run began with, at speed
1, and what it took without waiting for others."""

WINDOW = 8
"""Steps that are fitted together."""
AGREE = 3
"""Steps one after the other that must say the same before anything changes."""
SPEED_FLOOR = float(np.log(1.1))
"""Log of the factor that a rank must be off by, at least."""
COST_FLOOR = 0.1
"""Share by which the cost of what was run must be off, at least."""
REFINED = 0.02
"""Log of the factor by which a slow rank's speed is mended, once, when a whole window knows it."""
DEVIATIONS = 3.0
"""And so many standard deviations of the noise."""


@dataclass(frozen=True)
class Corrections:
    """How a machine differs from the cost model that a run began with."""

    attention_factor: float = 1.0
    """Of attention and its blocks."""
    linear_factor: float = 1.0
    """Of what is linear in the length."""
    g: float | None = None
    """Seconds of a micro-batch whatever it holds; None: as it was."""
    speeds: tuple[tuple[int, float], ...] = ()
    """Ranks, ascending, whose speed is another one, with that speed."""

    def of(self, base: CostModel, num_ranks: int) -> CostModel:
        """The cost model with these corrections; itself where there are none."""
        if self == Corrections():
            return base
        points = tuple((length, self.attention_factor * s) for length, s in base.attention_points)
        speeds = list(base.rank_speeds or (1.0,) * num_ranks)
        for rank, speed in self.speeds:
            speeds[rank] = speed
        return replace(
            base,
            a=self.attention_factor * base.a,
            attention_b=self.attention_factor * base.attention_b,
            attention_points=points,
            block_s=self.attention_factor * base.block_s,
            b=self.linear_factor * base.b,
            b_experts=self.linear_factor * base.b_experts,
            g=base.g if self.g is None else self.g,
            rank_speeds=tuple(speeds) if self.speeds else base.rank_speeds,
        )

    def to_record(self) -> dict[str, Any]:
        """These as plain values."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """What `to_record` made a record of."""
        speeds = tuple((int(rank), float(speed)) for rank, speed in record["speeds"])
        return cls(**{**record, "speeds": speeds})


@dataclass(frozen=True, eq=False)
class FilterState:
    """What the latest steps were, and what plans follow."""

    coefficients: Float64Array
    """In force: factors of attention and of linear work, seconds of a micro-batch."""
    base_g: float
    """The last of them as the run began."""
    speeds: Float64Array
    """In force; shape (ranks,)."""
    base_speeds: Float64Array
    """As the run began."""
    base: str
    """Name of the cost model that the run began with."""
    rows: Float64Array
    """Observations of the latest steps, oldest first; shape (steps, ranks, columns)."""
    ages: Float64Array
    """Steps since a rank's speed changed, up to `WINDOW`; 0 for those as they began."""
    num_off: int = 0
    """Steps, the latest one after the other, in which the coefficients were off."""
    error: float = 0.0
    """Middle error of what is in force in the latest step, relative."""

    @classmethod
    def begin(cls, base: CostModel, num_ranks: int) -> Self:
        """Nothing is known yet."""
        speeds = np.array(base.rank_speeds or (1.0,) * num_ranks)
        return cls(
            coefficients=np.array([1.0, 1.0, base.g]),
            base_g=base.g,
            speeds=speeds,
            base_speeds=speeds,
            base=cls.name_of(base),
            ages=np.zeros(num_ranks),
            rows=np.empty((0, num_ranks, len(COLUMNS))),
        )

    @staticmethod
    def name_of(base: CostModel) -> str:
        """What tells a cost model from others; whether it has speeds, not which."""
        plain = replace(base, rank_speeds=()).to_json()
        return hashlib.blake2b(plain, digest_size=8).hexdigest()

    def began_as(self, other: Self) -> bool:
        """Whether both began with the same cost model on the same ranks."""
        return self.base == other.base and np.array_equal(self.base_speeds, other.base_speeds)

    @property
    def num_ranks(self) -> int:
        """HDP ranks."""
        return len(self.speeds)

    @property
    def corrections(self) -> Corrections:
        """What is in force."""
        attention, linear, g = self.coefficients.tolist()
        others = np.flatnonzero(self.speeds != self.base_speeds)
        return Corrections(
            attention_factor=attention,
            linear_factor=linear,
            g=None if g == self.base_g else g,
            speeds=tuple((int(rank), float(self.speeds[rank])) for rank in others),
        )

    def on(self, begun: Self) -> Self:
        """Its coefficients for other ranks, of which nothing is known."""
        return replace(begun, coefficients=self.coefficients)

    def among(self, places: Sequence[int | None], begun: Self) -> Self:
        """What it knows when ranks have others' numbers; the latest steps are forgotten.

        Args:
            places: of each rank, which one it was; None: it is new.
            begun: nothing, of these ranks.
        """
        speeds, ages = begun.speeds.copy(), begun.ages.copy()
        for rank, before in enumerate(places):
            if before is not None:
                speeds[rank], ages[rank] = self.speeds[before], self.ages[before]
        return replace(begun, coefficients=self.coefficients, speeds=speeds, ages=ages)

    def to_record(self) -> dict[str, Any]:
        """It as plain values; arrays, of which rows may be long, as texts."""
        return {
            name: _text(value) if isinstance(value, np.ndarray) else value
            for name, value in vars(self).items()
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """What `to_record` made a record of."""
        found: dict[str, Any] = {
            name: _array(value) if isinstance(value, str) and name != "base" else value
            for name, value in record.items()
        }
        rows = found["rows"].reshape(-1, len(found["speeds"]), len(COLUMNS))
        return cls(**{**found, "rows": rows})


class Finding(NamedTuple):
    """A rank that changed its speed."""

    rank: int
    before: float
    now: float
    steps: int
    """For so many steps, the latest included."""


def observe(state: FilterState, observations: Float64Array) -> tuple[FilterState, list[Finding]]:
    """Returns what is known after one more step, and which ranks' speeds changed by it.

    Args:
        state: what was known before.
        observations: of each rank, see `COLUMNS`; shape (ranks, columns).

    Raises:
        ValueError: the observations are of other ranks.
    """
    expected = (state.num_ranks, len(COLUMNS))
    if observations.shape != expected:
        raise ValueError(f"observations of shape {observations.shape}, expected {expected}")
    if not (np.isfinite(observations).all() and (observations[:, -1] > 0).all()):
        return state, []  # a rank could not tell: the step is as if it had not been
    if not work(observations[:, :-1], state.coefficients).any():
        return state, []  # nothing ran
    rows = np.concatenate([state.rows[-(WINDOW - 1) :], observations[None]])
    state = replace(state, rows=rows, error=_error(state, observations))
    if len(rows) < AGREE:
        return state, []
    fitted = fit(rows[..., :-1], rows[..., -1], state.coefficients, state.speeds, SPEED_FLOOR)
    state, findings = _with_speeds(state, fitted)
    return _with_coefficients(state, fitted), findings


def _error(state: FilterState, observations: Float64Array) -> float:
    predicted = work(observations[:, :-1], state.coefficients) / state.speeds
    ran = predicted > 0
    return float(np.median(np.abs(predicted[ran] / observations[ran, -1] - 1)))


def _with_speeds(state: FilterState, fitted: Fit) -> tuple[FilterState, list[Finding]]:
    # beside one of few ranks, that one's noise counts, too
    noise = fitted.noise * (1 + 2 / state.num_ranks) ** 0.5
    least = max(SPEED_FLOOR, DEVIATIONS * noise)
    latest = fitted.excess[-AGREE:]
    off = (latest > least).all(axis=0) | (latest < -least).all(axis=0)
    speeds, findings = state.speeds.copy(), []
    ages = np.minimum(state.ages + (state.ages > 0), WINDOW)
    is_whole = (state.ages == WINDOW - 1) & (ages == WINDOW)  # once, by all that is known of it
    for rank in np.flatnonzero(off | is_whole).tolist():
        excess = fitted.excess[:, rank]
        base, before = float(state.base_speeds[rank]), float(speeds[rank])
        shift = float(np.median(latest[:, rank] if off[rank] else excess))
        if not off[rank] and abs(shift) < REFINED:
            continue
        now = before * float(np.exp(-shift))
        is_as_before = abs(np.log(now / base)) < SPEED_FLOOR
        speeds[rank] = base if is_as_before else max(float(f"{now:.2g}"), 1e-3)
        along = np.sign(excess[-1]) * excess[::-1] > least
        steps = len(along) if along.all() or not off[rank] else int(np.argmin(along))
        ages[rank] = float(off[rank] and not is_as_before) or ages[rank]
        findings.append(Finding(rank, before, float(speeds[rank]), steps))
    return replace(
        state, speeds=speeds, ages=np.where(speeds == state.base_speeds, 0, ages)
    ), findings


def _with_coefficients(state: FilterState, fitted: Fit) -> FilterState:
    features = state.rows[..., :-1].reshape(-1, len(COLUMNS) - 1)
    features = features[work(features, state.coefficients) > 0]  # of ranks that ran something
    ratios = work(features, fitted.coefficients) / work(features, state.coefficients)
    off = float(np.quantile(np.abs(np.log(ratios)), 0.9))
    doubt = fitted.noise * (features.shape[1] / len(features)) ** 0.5
    if off <= max(COST_FLOOR, (DEVIATIONS + 1) * doubt):
        return replace(state, num_off=0)
    if state.num_off + 1 < AGREE:
        return replace(state, num_off=state.num_off + 1)
    rounded = np.array([float(f"{value:.3g}") for value in fitted.coefficients.tolist()])
    return replace(state, coefficients=rounded, num_off=0)


def _text(array: Float64Array) -> str:
    return base64.b64encode(np.ascontiguousarray(array, dtype="<f8").tobytes()).decode()


def _array(text: str) -> Float64Array:
    return np.frombuffer(base64.b64decode(text), dtype="<f8").astype(np.float64)

"""Coefficients from times: weighted non-negative least squares on relative errors, numpy only.

Whole micro-batches, attention and experts alone give the coefficients of compute. With these, what
rings and transfers take gives those of traffic. Both are linear but for what attention hides of a
ring's traffic (`planner.cost_model`): whether a pass of a ring has traffic left to see is asked of
the coefficients so far, and the fit is repeated until that changes no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_hdp.arrays import Float64Array
from megatron_hdp.planner import CostModel
from megatron_hdp.profile.cases import ATTENTION, COMPUTE, EXPERTS, RING, TRANSFER, Case

_OF_COMPUTE = ("a", "attention_b", "b", "b_experts", "g", "g_experts", "block")
_OF_RINGS = ("more_block", "merge", "intra_hop", "intra_byte", "inter_hop", "inter_byte")
NAMES = (*_OF_COMPUTE, *_OF_RINGS)
"""Seconds per token^2, per token three times, per micro-batch and per call of the experts by
themselves, per block of attention by itself; what a further block of a ring takes beyond that, for
itself and per token; per hop and per byte within a node and between nodes."""
_A, _ATTENTION_B, _B, _B_EXPERTS, _G, _G_EXPERTS, _BLOCK, _MORE_BLOCK, _MERGE = range(9)
_PASSES = (1 / 3, 2 / 3)  # of attention, and of traffic, forward and backward
_WEIGHTS = {COMPUTE: 1.0, ATTENTION: 0.5, EXPERTS: 0.5, RING: 1.0, TRANSFER: 0.1}
"""Of relative errors. Rings say what traffic costs them, the work beside it included; transfers by
themselves decide only what rings hide."""
_ON_ONE_RANK = (COMPUTE, ATTENTION, EXPERTS)
_MUST_COST = ("b", "b_experts")  # what no token is without
KINDS = ((COMPUTE, "micro-batches of one rank"), (RING, "micro-batches of rings"))
MOST_ERROR = 0.25
"""By which a usable fit misses, in the median, the cases of a kind that are held out."""
_SURE = 3.0  # times that the ends of an interval may differ without a warning
_MOST_ROUNDS = 20
_RESAMPLES = 200


@dataclass(frozen=True)
class Shape:
    """What of a run turns coefficients into times."""

    layers: int
    """Layers of all pipeline stages."""
    counted: CostModel
    """Bytes, and what of attention is in a window; its seconds are not read."""


@dataclass(frozen=True)
class Measured:
    """A case and what it took, once for each repetition."""

    case: Case
    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """The median over the repetitions."""
        return float(np.median(self.seconds))


@dataclass(frozen=True)
class Fit:
    """What the times say."""

    values: Mapping[str, float]
    """Each coefficient that the cases can tell, by its name in `NAMES`."""
    shape: Shape
    resampled: tuple[Fit, ...] = ()
    """Fits to repetitions drawn from these with replacement: how sure the values are."""

    def predicted_s(self, case: Case) -> float:
        """What a case takes by the cost model."""
        values = np.array([self.values.get(name, 0.0) for name in NAMES])
        return float(_row(case, self.shape, values) @ values)


def fit(
    measured: Sequence[Measured], shape: Shape, seed: int = 0, resamples: int = _RESAMPLES
) -> Fit:
    """Fits all coefficients that the cases which are not held out can tell.

    Raises:
        ValueError: too few cases, or too similar cases.
    """
    measured = [one for one in measured if not one.case.is_held_out]
    medians = np.array([one.median_s for one in measured])
    known = _known(one.case for one in measured)
    if len(measured) < len(known):
        raise ValueError(
            f"{len(measured)} cases were timed, expected at least {len(known)}, one for each "
            f"coefficient ({', '.join(NAMES[i] for i in known)}): raise --budget-seconds"
        )
    cases = [one.case for one in measured]
    values = _solve(cases, medians, shape, known, must_tell=True)
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(resamples):
        drawn = [np.median(rng.choice(one.seconds, len(one.seconds))) for one in measured]
        samples.append(Fit(_named(_solve(cases, np.array(drawn), shape, known), known), shape))
    return Fit(_named(values, known), shape, tuple(samples))


def _named(values: Float64Array, known: Sequence[int]) -> dict[str, float]:
    return {NAMES[i]: float(values[i]) for i in known}


def coefficients_of(found: Fit) -> dict[str, float]:
    """What a fit says in the names of `CostModel`; what it does not tell is left out."""
    values = found.values
    more = values.get("more_block", 0.0)
    of_model = {name: values[name] for name in ("a", "attention_b", "b")}
    of_model["block_s"] = values["block"] + more
    of_model["g"] = max(0.0, values["g"] - 2 * found.shape.layers * more)
    for name, of_cases in (("b_experts", "b_experts"), ("merge_b", "merge")):
        if of_cases in values:
            of_model[name] = values[of_cases]
    for where in ("intra", "inter"):
        if f"{where}_hop" in values:
            of_model[f"{where}_node_hop_s"] = values[f"{where}_hop"]
        if values.get(f"{where}_byte", 0.0) > 0:
            of_model[f"{where}_node_bytes_per_s"] = 1 / values[f"{where}_byte"]
    return of_model


def nine_of_ten(samples: Sequence[float]) -> tuple[float, float]:
    """The interval in which nine of ten samples are."""
    low, high = np.quantile(samples, (0.05, 0.95), method="nearest")
    return float(low), float(high)


def _intervals(found: Fit) -> Iterator[tuple[str, float, float]]:
    """What no token is without, and in which interval nine of ten resampled fits have it."""
    for name in _MUST_COST:
        if name in found.values:
            yield name, *nine_of_ten([one.values[name] for one in found.resampled])


def noise_in(found: Fit, measured: Sequence[Measured]) -> str | None:
    """Why the times are too noisy to use; else None.

    By them a token may cost nothing, or they say little of the cases that are held out.
    """
    for name, low, high in _intervals(found):
        if min(low, found.values[name]) <= 0:
            return (
                f"{_TOO_NOISY}: found {name} = {found.values[name]:.3g} s per token ({low:.3g} to "
                f"{high:.3g} in nine of ten fits), expected more than 0"
            )
    for kind, words in KINDS:
        error = median_error(found, measured, kind, is_held_out=True)
        if error is not None and not error <= MOST_ERROR:
            return (
                f"{_TOO_NOISY}: found that it misses {words} that are held out by {error:.1%} in "
                f"the median, expected at most {MOST_ERROR:.0%}"
            )
    return None


_TOO_NOISY = "the measured times are too noisy for a cost model"


def median_error(
    found: Fit, measured: Iterable[Measured], kind: str, *, is_held_out: bool
) -> float | None:
    """The median relative error of a kind of case, positive; None if there are no such cases."""
    cases = [one for one in measured if one.case.kind == kind]
    cases = [one for one in cases if one.case.is_held_out == is_held_out]
    return float(np.median(abs(errors_of(found, cases)))) if cases else None


def warnings_of(found: Fit) -> list[str]:
    """What the times bound badly, although they can be used."""
    warnings = [
        f"{name} is uncertain, nine of ten fits have {low:.3g} to {high:.3g}: profile again while "
        "nothing else uses the machine, or raise --budget-seconds"
        for name, low, high in _intervals(found)
        if high > _SURE * low
    ]
    if found.values["a"] + found.values["attention_b"] == 0:
        warnings.append(
            "attention took no longer for more tokens, so a and attention_b are 0: raise "
            "--hdp-tokens-per-rank, so that there are longer sequences"
        )
    return warnings


def wires_of(measured: Sequence[Measured]) -> dict[str, tuple[float, float]]:
    """Seconds of a hop and seconds per byte of transfers by themselves, by "intra" or "inter"."""
    found = {}
    for where, leaves_node in (("intra", False), ("inter", True)):
        wires = [one for one in measured if one.case.kind == TRANSFER]
        here = [one for one in wires if one.case.leaves_node == leaves_node]
        if len(here) < 2:
            continue
        rows = np.array([[1.0, one.case.num_bytes] for one in here])
        medians = np.array([one.median_s for one in here])
        hop_s, s_per_byte = nonnegative(rows / medians[:, None], np.ones(len(here)))
        found[where] = (float(hop_s), float(s_per_byte))
    return found


def errors_of(found: Fit, measured: Iterable[Measured]) -> Float64Array:
    """Relative errors, predicted against the medians."""
    return np.array([found.predicted_s(one.case) / one.median_s - 1 for one in measured])


def _known(cases: Iterable[Case]) -> list[int]:
    """The coefficients about which the cases say something."""
    known: set[int] = set()
    for case in cases:
        known |= {
            COMPUTE: {_A, _ATTENTION_B, _B, _G, _BLOCK},
            RING: {_MORE_BLOCK, _MERGE, *_traffic(case)},
            ATTENTION: {_A, _ATTENTION_B, _BLOCK},
            EXPERTS: {_B_EXPERTS, _G_EXPERTS},
            TRANSFER: set(_traffic(case)),
        }[case.kind]
    return sorted(known)


def _traffic(case: Case) -> tuple[int, int]:
    first = NAMES.index("inter_hop" if case.leaves_node else "intra_hop")
    return first, first + 1


def _solve(
    cases: Sequence[Case],
    seconds: Float64Array,
    shape: Shape,
    known: Sequence[int],
    must_tell: bool = False,
) -> Float64Array:
    values = np.zeros(len(NAMES))
    of_compute = [i for i, case in enumerate(cases) if case.kind in _ON_ONE_RANK]
    of_rings = [i for i, case in enumerate(cases) if case.kind in (RING, TRANSFER)]
    columns = [i for i in known if i <= _BLOCK]
    rows, weights = _table(cases, of_compute, seconds, shape, values)
    if must_tell:
        _require_rank(rows[:, columns], columns)
    values[columns] = nonnegative(rows[:, columns], weights * seconds[of_compute])
    if of_rings:
        _add_traffic(values, cases, of_rings, seconds, shape, [i for i in known if i > _BLOCK])
    return values


def _add_traffic(
    values: Float64Array,
    cases: Sequence[Case],
    here: Sequence[int],
    seconds: Float64Array,
    shape: Shape,
    columns: list[int],
) -> None:
    """Fits traffic over the compute in ``values``, and what a ring's further blocks take beyond it.

    The cost model has one time for all blocks: what they take more is taken from g
    (`coefficients_of`), so it is no more than g has.
    """
    most_more = float(values[_G]) / (2 * shape.layers)
    rest = [i for i in columns if i != _MORE_BLOCK]
    seen: list[bytes] = []
    for _ in range(_MOST_ROUNDS):
        rows, weights = _table(cases, here, seconds, shape, values)
        if rows.tobytes() in seen:
            break
        seen.append(rows.tobytes())
        values[columns] = 0.0
        wanted = weights * seconds[list(here)] - rows @ values
        values[columns] = nonnegative(rows[:, columns], wanted)
        if values[_MORE_BLOCK] > most_more:
            values[_MORE_BLOCK] = most_more
            wanted -= rows[:, _MORE_BLOCK] * most_more
            values[rest] = nonnegative(rows[:, rest], wanted)


def _table(
    cases: Sequence[Case],
    here: Sequence[int],
    seconds: Float64Array,
    shape: Shape,
    values: Float64Array,
) -> tuple[Float64Array, Float64Array]:
    """Rows of some cases, and their weights, by which the rows are multiplied."""
    weights = np.array([_WEIGHTS[cases[i].kind] for i in here]) / seconds[list(here)]
    rows = np.array([_row(cases[i], shape, values) for i in here])
    return rows * weights[:, None], weights


def _require_rank(rows: Float64Array, known: Sequence[int]) -> None:
    scaled = rows / np.maximum(np.linalg.norm(rows, axis=0), np.finfo(float).tiny)
    rank = int(np.linalg.matrix_rank(scaled, tol=1e-6))
    if rank < len(known):
        raise ValueError(
            f"the cases distinguish {rank} coefficients, expected {len(known)} "
            f"({', '.join(NAMES[i] for i in known)}): raise --budget-seconds or "
            "--hdp-tokens-per-rank, so that there are more lengths"
        )


def _row(case: Case, shape: Shape, values: Float64Array) -> Float64Array:
    """What each coefficient is multiplied with; `values` say which traffic is seen."""
    row = np.zeros(len(NAMES))
    if case.kind == TRANSFER:
        hop, byte = _traffic(case)
        row[hop], row[byte] = 1.0, case.num_bytes
        return row
    lengths = np.array(case.lengths, dtype=np.float64)
    if case.kind == EXPERTS:
        row[_B_EXPERTS], row[_G_EXPERTS] = lengths.sum(), 1.0
        return row
    row[_A] = shape.counted.seen(lengths).sum() / case.degree
    row[_ATTENTION_B] = lengths.sum() / case.degree
    row[_BLOCK] = 2 * shape.layers * case.degree
    if case.kind == ATTENTION:
        return row
    row[[_B, _B_EXPERTS]] = row[_ATTENTION_B]
    row[_G] = 1.0
    if case.kind == COMPUTE:
        return row
    hops = case.degree - 1
    row[_MORE_BLOCK] = 2 * shape.layers * hops
    row[_MERGE] = hops * row[_B]
    hop, byte = _traffic(case)
    attention = np.zeros(len(NAMES))
    attention[[_A, _ATTENTION_B]] = row[[_A, _ATTENTION_B]]
    sent = 3 * hops * lengths.sum() / case.degree * shape.counted.kv_bytes_per_token
    for share in _PASSES:
        exposed = -share * hops / case.degree * attention
        exposed[hop] = hops * shape.layers
        exposed[byte] = share * sent
        is_first = not values[[hop, byte]].any()
        if is_first or exposed @ values > 0:
            row += exposed
    row[byte] += shape.counted.halo_bytes
    return row


def nonnegative(rows: Float64Array, wanted: Float64Array) -> Float64Array:
    """The x >= 0 with the least ``|rows x - wanted|``, by Lawson's and Hanson's active sets.

    Args:
        rows: shape (equations, unknowns).
        wanted: shape (equations,).
    """
    scale = np.maximum(np.linalg.norm(rows, axis=0), np.finfo(float).tiny)
    matrix = rows / scale
    x, free = np.zeros(matrix.shape[1]), np.zeros(matrix.shape[1], dtype=bool)
    for _ in range(10 * len(x)):
        gradient = matrix.T @ (wanted - matrix @ x)
        gradient[free] = -np.inf
        best = int(gradient.argmax())
        if gradient[best] <= 1e-12 * len(wanted):
            break
        free[best] = True
        while True:
            trial = np.zeros_like(x)
            trial[free] = np.linalg.lstsq(matrix[:, free], wanted, rcond=None)[0]
            below = free & (trial <= 0)
            if not below.any():
                break
            step = (x[below] / (x[below] - trial[below])).min() if (x[below] > 0).any() else 0.0
            x = x + step * (trial - x)
            free &= x > 1e-15
            x[~free] = 0.0
        x = trial
    result: Float64Array = x / scale
    return result

"""Fits measured times of ranks: coefficients that all share, and a factor of each rank.

A rank's time in a step is the sum over its micro-batches, waiting left out, of work / speed, its
work being ``coefficients . features``. Coefficients and speeds can be told apart because the plan
gives ranks different mixtures of long and short sequences while all have the same coefficients, and
because most ranks run alike: a rank's factor is what is left of its times, step after step, beside
those of the others. One factor common to all is in the coefficients.

A rank that ran nothing in a step says nothing of itself there: it counts as what is known of it.

Ranks are put in the order of their values first, so that the result has the same bits in whatever
order they are given.
"""

import math
from itertools import combinations
from typing import NamedTuple

import numpy as np

from megatron_hdp.arrays import BoolArray, Float64Array

_ROUNDS = 3
_HUBER = 2.0  # deviations of the noise from which on a row counts less
_PRIOR = np.array([1.0, 1.0, 10.0])  # weight of each coefficient in force, in rows
_LEAST = np.array([0.1, 0.1, 0.0])
"""Share of each coefficient in force, common factor included, below which none falls at once: what
a window has little of is hardly told by it, and must not cost nothing in plans."""
_FEW = 32  # differences in time below which noise counts as no less than the next
_PRIOR_NOISE = 0.05


class Fit(NamedTuple):
    """What a window of steps says."""

    coefficients: Float64Array
    """Factor of each feature; shape (features,)."""
    excess: Float64Array
    """Log of each time over what coefficients and speeds give, less that of the step's reference
    rank, 0 where nothing ran; shape (steps, ranks)."""
    noise: float
    """Standard deviation of a rank's excess from one step to the next."""


def fit(
    features: Float64Array,
    seconds: Float64Array,
    coefficients: Float64Array,
    speeds: Float64Array,
    floor: float,
) -> Fit:
    """Fits a window of steps.

    Args:
        features: work of each rank, in each step some; shape (steps, ranks, features).
        seconds: that it took; shape (steps, ranks).
        coefficients: in force; shape (features,).
        speeds: in force; shape (ranks,).
        floor: of the log of a rank's factor: what is less is no factor.
    """
    order = np.lexsort([speeds, *seconds, *np.concatenate(features.swapaxes(1, 2))])
    features, seconds, speeds = features[:, order], seconds[:, order], speeds[order]
    _, references = _excess(_logs(features, seconds, coefficients, speeds))
    found = prior = coefficients * float(np.exp(np.median(references)))
    # what no step has any of cannot be told
    given: BoolArray = np.any(features > 0, axis=(0, 1))
    for _ in range(_ROUNDS):
        logs = _logs(features, seconds, found, speeds)
        (excess, references), noise = _excess(logs), _noise(logs)
        factors = np.median(excess, axis=0)
        factors = np.where(np.abs(factors) > max(floor, 3 * noise), factors, 0.0)
        weights = _weights(excess - factors, references, noise, floor)
        times = seconds * speeds * np.exp(-factors)
        found = _solve(
            features.reshape(-1, features.shape[2]),
            times.reshape(-1),
            weights.reshape(-1),
            prior,
            given,
        )
    logs = _logs(features, seconds, found, speeds)
    back = np.argsort(order)
    return Fit(found, _excess(logs)[0][:, back], _noise(logs))


def work(features: Float64Array, coefficients: Float64Array) -> Float64Array:
    """Seconds of each row at speed 1; no matrix product, whose bits depend on a row's place."""
    seconds = np.zeros(features.shape[:-1])
    for i, value in enumerate(coefficients.tolist()):
        seconds += features[..., i] * value
    return seconds


def _logs(
    features: Float64Array, seconds: Float64Array, coefficients: Float64Array, speeds: Float64Array
) -> Float64Array:
    """Of each time over what coefficients and speeds give; NaN where nothing ran."""
    predicted = work(features, coefficients)
    ran = predicted > 0
    logs: Float64Array = np.log(seconds * speeds / np.where(ran, predicted, np.nan))
    return logs


def _excess(logs: Float64Array) -> tuple[Float64Array, Float64Array]:
    """Beside the middle rank of each step, of two the faster one; and that one's."""
    middle = (np.isfinite(logs).sum(axis=1) - 1) // 2  # NaN are sorted behind all others
    references = np.take_along_axis(np.sort(logs, axis=1), middle[:, None], axis=1)
    return np.nan_to_num(logs - references, nan=0.0), references[:, 0]


def _noise(logs: Float64Array) -> float:
    """From differences of neighbouring steps, which know nothing of how fast a rank is."""
    ranks = logs.shape[1]
    if ranks == 1 or len(logs) == 1:
        return 0.0
    deviations = logs - np.nanmedian(logs, axis=1)[:, None]
    steps = np.abs(np.diff(deviations, axis=0))
    steps = steps[np.isfinite(steps)]
    if not steps.size:
        return _PRIOR_NOISE
    found = 1.4826 * float(np.median(steps)) / math.sqrt(2 * (ranks - 1) / ranks)
    return found if steps.size >= _FEW else max(found, _PRIOR_NOISE)


def _weights(
    excess: Float64Array, references: Float64Array, noise: float, floor: float
) -> Float64Array:
    """Less for rows off the others; nothing for steps in which all ranks were slow at once."""
    width = max(_HUBER * noise, floor / 2)
    weights = np.minimum(1.0, width / np.maximum(np.abs(excess), width))
    off = np.abs(references - np.median(references))
    weights[off > max(floor, 3 * 1.4826 * float(np.median(off)))] = 0.0
    return weights


def _solve(
    features: Float64Array,
    seconds: Float64Array,
    weights: Float64Array,
    prior: Float64Array,
    given: BoolArray,
) -> Float64Array:
    """Least squares of relative errors over coefficients of no less than `_LEAST` of `prior`."""
    least = _LEAST * prior
    seconds = seconds - work(features, least)
    predicted = work(features, prior)
    root = np.sqrt(weights) / np.where(predicted > 0, predicted, np.inf)
    shares = [root * features[:, i] for i in range(len(prior))]
    target = root * seconds
    rows = np.stack([*shares, target])
    used = [i for i in range(len(prior)) if given[i]]
    # in units in which a coefficient of 1 is the whole of a mean row
    units = np.array([max(float(row.mean()), 1e-300) for row in rows[:-1]])
    gram = np.array([[float((rows[i] * rows[j]).sum()) for j in used] for i in used])
    right = np.array([float((rows[i] * rows[-1]).sum()) for i in used])
    weight = _PRIOR[used]
    gram = gram / np.outer(units[used], units[used]) + np.diag(weight)
    right = right / units[used] + weight * ((prior - least) * units)[used]
    best, lowest = prior, np.inf
    for count in range(1, len(used) + 1):
        for chosen in combinations(range(len(used)), count):
            part = np.ix_(chosen, chosen)
            values = np.linalg.solve(gram[part], right[list(chosen)])
            if (values < 0).any():
                continue
            loss = float(values @ gram[part] @ values - 2 * values @ right[list(chosen)])
            if loss < lowest:
                best, lowest = np.where(given, least, prior), loss
                for place, value in zip(chosen, values.tolist(), strict=True):
                    best[used[place]] += value / units[used[place]]
    return best

"""Statistics of an order that a random one keeps within limits, at a stated significance."""

from statistics import NormalDist

import numpy as np

SIGNIFICANCE = 1e-6
"""How often a random order exceeds the limits of one statistic."""
BUCKETS = 32


def _limits(degrees):
    """Both limits of chi-square with many degrees of freedom (Wilson and Hilferty's formula)."""
    z, spread = NormalDist().inv_cdf(1 - SIGNIFICANCE / 2), 2 / (9 * degrees)
    return [degrees * (1 - spread + sign * z * spread**0.5) ** 3 for sign in (-1, 1)]


def _is_even(counts, expected, degrees):
    statistic = ((counts - expected) ** 2 / expected).sum()
    low, high = _limits(degrees)
    return bool(low <= statistic <= high)


def are_independent(first, first_size, second, second_size):
    """Whether two numbers of each item, drawn below their sizes, have nothing to do with another.

    Chi-square over buckets of the first and of the second.
    """
    boxes = first * BUCKETS // first_size * BUCKETS + second * BUCKETS // second_size
    counts = np.bincount(boxes, minlength=BUCKETS**2).reshape(BUCKETS, BUCKETS)
    expected = counts.sum(1, keepdims=True) * counts.sum(0, keepdims=True) / len(first)
    return _is_even(counts, expected, (BUCKETS - 1) ** 2)


def are_uncorrelated(first, second):
    """Whether the correlation of two columns is that of random ones."""
    z = np.corrcoef(first, second)[0, 1] * len(first) ** 0.5
    return bool(abs(z) <= NormalDist().inv_cdf(1 - SIGNIFICANCE / 2))


def steps_are_even(rows, num_rows, lag):
    """Whether the way from a row to the one ``lag`` later takes all lengths alike."""
    ways = (rows[lag:] - rows[:-lag]) % num_rows
    counts = np.bincount(ways * BUCKETS // num_rows, minlength=BUCKETS)
    return _is_even(counts, len(ways) / BUCKETS, BUCKETS - 1)


def faults(rows, num_rows, lags):
    """What a random order would not do.

    Args:
        rows: at successive positions of an epoch.
        num_rows: of the epoch.
        lags: distances of positions to look at.
    """
    positions = np.arange(len(rows))
    found = []
    if not are_independent(positions, len(rows), rows, num_rows):
        found.append("position and row")
    for lag in lags:
        if not are_independent(rows[:-lag], num_rows, rows[lag:], num_rows):
            found.append(f"a row and the one {lag} later")
        if not are_uncorrelated(rows[:-lag], rows[lag:]):
            found.append(f"correlation at lag {lag}")
        if not steps_are_even(rows, num_rows, lag):
            found.append(f"way to the row {lag} later")
    return found

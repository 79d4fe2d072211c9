"""Compute as a function of the length: where it is sampled, and what it may return."""

import math

import numpy as np
from numpy.typing import ArrayLike

from megatron_hdp.arrays import Float64Array, Int64Array

LONGEST = 2**40
"""The planner takes no longer sequence."""
_EVERY_LENGTH = 64
"""A function of the length is sampled at every length up to this one."""
_SAMPLING_RATIO = 1.02
"""And from there on at lengths so far apart: a line between them misses s^2 by 1e-4 of it."""


def sampled_lengths(max_length: int) -> Int64Array:
    """Lengths at which a function is looked at, ascending; ValueError for one out of range."""
    if type(max_length) is not int or not 1 <= max_length <= LONGEST:
        raise ValueError(f"max_length is {max_length!r}; expected an integer from 1 to {LONGEST:,}")
    lengths = list(range(1, min(max_length, _EVERY_LENGTH) + 1))
    while lengths[-1] < max_length:
        lengths.append(min(max_length, int(lengths[-1] * _SAMPLING_RATIO) + 1))
    return np.array(lengths, dtype=np.int64)


def checked_costs(values: ArrayLike, lengths: Int64Array) -> Float64Array:
    """What it returned for these, as seconds; ValueError if it can be no compute."""
    try:
        found = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the cost function returned a {type(values).__name__} of which numpy makes no array; "
            f"expected numbers of shape {lengths.shape}: the seconds of each of the lengths that "
            "it is given"
        ) from error
    if found.shape != lengths.shape or found.dtype.kind not in "fiu":
        raise ValueError(
            f"the cost function returned {found.dtype} of shape {found.shape}; expected numbers of "
            f"shape {lengths.shape}: the seconds of each of the lengths that it is given"
        )
    seconds = found.astype(np.float64)
    for length, now, before in zip(lengths, seconds, [0.0, *seconds[:-1]], strict=True):
        if not 0 <= now < math.inf:
            wanted = "a finite number >= 0"
        elif now < before:
            wanted = f"at least {float(before)!r} s, which a shorter one takes"
        else:
            continue
        raise ValueError(
            f"the cost function returned {float(now)!r} s for {length:,} tokens; expected {wanted}"
        )
    return seconds

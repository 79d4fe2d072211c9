"""The order of an epoch in numpy, written apart from csrc/data; also with fewer rounds."""

import math

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
ROUNDS = 12


def mixed(value):
    """SplitMix64's finaliser."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def keys(seed, source, epoch, rounds):
    """One for each round."""
    with np.errstate(over="ignore"):
        state = np.uint64(0)
        for word in (seed, source, epoch):
            state = mixed((state ^ np.uint64(word)) + GOLDEN)
        return [mixed(state + np.uint64(i) * GOLDEN) for i in range(1, rounds + 1)]


def halves(num_rows):
    """How many values the left and the right half have."""
    left = math.isqrt(num_rows - 1) + 1
    left += left % 2
    return left, -(-num_rows // left)


def rows_at(positions, num_rows, *, seed=0, source=0, epoch=0, rounds=ROUNDS):
    """The rows at positions of an epoch."""
    sizes = [np.uint64(size) for size in halves(num_rows)]
    rows = np.array(positions, dtype=np.uint64)
    walking = np.ones(len(rows), dtype=bool)
    while walking.any():
        pair = list(np.divmod(rows[walking], sizes[1]))
        for i, key in enumerate(keys(seed, source, epoch, rounds)):
            to, by = i % 2, 1 - i % 2
            number = ((mixed(pair[by] ^ key) >> np.uint64(24)) * sizes[to]) >> np.uint64(40)
            pair[to] = (pair[to] + number) % sizes[to]
        rows[walking] = pair[0] * sizes[1] + pair[1]
        walking = rows >= num_rows
    return rows.astype(np.int64)

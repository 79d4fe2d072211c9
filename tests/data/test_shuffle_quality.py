"""The order looks random by statistics that a bad one does not pass.

Limits hold for a random order but once in a million (`order_statistics.SIGNIFICANCE`), each of some
hundred statistics here; seeds are fixed, so a failure is no accident of a run.
"""

import math
from itertools import permutations

import numpy as np
import pytest

from megatron_hdp.data.shuffles import Feistel
from tests.support import feistel
from tests.support.order_statistics import are_independent, are_uncorrelated, faults

NUM_ROWS = 100_003
EPOCHS = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (2**64 - 1, 7, 2**40)]
"""Seed, source, epoch."""


def order(seed, source, epoch):
    return Feistel(NUM_ROWS, seed, source).rows(epoch, 0, NUM_ROWS)


def lags(num_rows):
    """Neighbours, and positions that differ in one half of the network's pairs only."""
    return (1, 2, feistel.halves(num_rows)[1])


BAD = {
    "identity": np.arange(NUM_ROWS),
    "affine": np.arange(NUM_ROWS) * 61_803 % NUM_ROWS,
    "reversed": np.arange(NUM_ROWS)[::-1],
    **{
        f"{rounds} rounds": feistel.rows_at(np.arange(NUM_ROWS), NUM_ROWS, seed=1, rounds=rounds)
        for rounds in (1, 2, 3, 4)
    },
}


@pytest.mark.parametrize("seed", range(5))
def test_numpys_permutations_pass(seed):
    rows = np.random.default_rng(seed).permutation(NUM_ROWS)
    assert faults(rows, NUM_ROWS, lags(NUM_ROWS)) == []


@pytest.mark.parametrize("name", BAD)
def test_bad_permutations_do_not_pass(name):
    assert np.array_equal(np.sort(BAD[name]), np.arange(NUM_ROWS))
    assert faults(BAD[name], NUM_ROWS, lags(NUM_ROWS)) != []


@pytest.mark.parametrize(("seed", "source", "epoch"), EPOCHS)
def test_an_epoch_passes(seed, source, epoch):
    assert faults(order(seed, source, epoch), NUM_ROWS, lags(NUM_ROWS)) == []


@pytest.mark.parametrize("num_rows", [2**20, 2**20 + 1, 10**9, 2**48])
@pytest.mark.parametrize("where", [0.0, 0.4])
def test_a_step_of_a_long_epoch_passes(num_rows, where):
    rows = Feistel(num_rows, 3).rows(1, int(where * num_rows), 60_000)
    assert len(np.unique(rows)) == len(rows)
    assert faults(rows, num_rows, (1, 2)) == []


def test_epochs_have_nothing_to_do_with_each_other():
    orders = [order(*one) for one in EPOCHS]
    for i, first in enumerate(orders):
        for second in orders[:i]:
            assert are_independent(first, NUM_ROWS, second, NUM_ROWS)
            assert are_uncorrelated(first, second)
            assert (first == second).sum() <= 12  # one in the mean: 13 or more in 1 of 10^10
    assert not are_independent(orders[0], NUM_ROWS, orders[0], NUM_ROWS)
    assert not are_uncorrelated(orders[0], np.roll(orders[0], 1) + orders[0])


@pytest.mark.parametrize("num_rows", [2, 3, 4, 5, 6])
def test_all_orders_of_a_tiny_epoch_come_alike(num_rows):
    found = _counts(num_rows, lambda epoch: Feistel(num_rows, 1).rows(epoch, 0, num_rows))
    assert _is_even(found)


def test_few_rounds_favour_some_orders():
    positions = np.arange(5)
    found = _counts(5, lambda epoch: feistel.rows_at(positions, 5, seed=1, epoch=epoch, rounds=4))
    assert not _is_even(found)


def _counts(num_rows, order_of):
    """How often each order came in 30 times as many epochs as there are orders."""
    number = {order: i for i, order in enumerate(permutations(range(num_rows)))}
    drawn = [number[tuple(order_of(epoch).tolist())] for epoch in range(30 * len(number))]
    return np.bincount(drawn, minlength=len(number))


def _is_even(counts):
    """Chi-square within five standard deviations of its mean."""
    degrees = len(counts) - 1
    statistic = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
    return statistic <= degrees + 5 * math.sqrt(2 * degrees)

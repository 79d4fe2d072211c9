"""Every version of the order is a permutation that never changes, whatever the platform."""

import statistics
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hdp.data.shuffles import LATEST_ORDER, Feistel, SortedDraws, shuffle_of
from tests.support import feistel

words = st.integers(0, 2**64 - 1)


@pytest.mark.parametrize("make", [SortedDraws, Feistel])
@given(num_rows=st.integers(1, 5000), seed=words, epoch=st.integers(0, 2**62))
def test_every_row_comes_once(make, num_rows, seed, epoch):
    rows = make(num_rows, seed).rows(epoch, 0, num_rows)
    assert np.array_equal(np.sort(rows), np.arange(num_rows))


@pytest.mark.parametrize("num_rows", [*range(1, 130), 255, 256, 257, 65535, 65536, 65537])
def test_every_row_comes_once_at_each_small_number(num_rows):
    for epoch in range(3):
        rows = Feistel(num_rows, 5).rows(epoch, 0, num_rows)
        assert np.array_equal(np.sort(rows), np.arange(num_rows))


@given(st.data(), st.integers(1, 2**48), words, words, st.integers(0, 2**62))
def test_any_position_is_what_the_reference_says(data, num_rows, seed, source, epoch):
    first = data.draw(st.integers(0, num_rows))
    count = data.draw(st.integers(0, min(200, num_rows - first)))
    rows = Feistel(num_rows, seed, source).rows(epoch, first, count)
    positions = np.arange(first, first + count)
    expected = feistel.rows_at(positions, num_rows, seed=seed, source=source, epoch=epoch)
    assert np.array_equal(rows, expected)
    assert count == 0 or (rows.min() >= 0 and rows.max() < num_rows)


def test_the_latest_version_never_changes():
    # Written down so that whatever changes the steps of running jobs is noticed.
    assert Feistel(10, 1234).rows(0, 0, 10).tolist() == [5, 0, 6, 3, 7, 1, 4, 8, 2, 9]
    assert Feistel(10, 1234).rows(1, 0, 10).tolist() == [9, 8, 4, 3, 7, 0, 5, 6, 2, 1]
    assert Feistel(10, 1234, source=1).rows(0, 0, 10).tolist() == [7, 8, 4, 6, 1, 2, 9, 3, 0, 5]
    far = Feistel(10**9, 1, source=2)
    assert far.rows(3, 0, 3).tolist() == [699793676, 381043726, 214480454]
    assert far.rows(3, 10**9 - 1, 1).tolist() == [441584624]
    largest = Feistel(2**48, 2**64 - 1)
    assert largest.rows(2**40, 0, 2).tolist() == [168463200198644, 221027842530788]
    assert largest.rows(2**40, 2**48 - 1, 1).tolist() == [63943077703817]


def test_the_first_version_never_changes():
    shuffle = shuffle_of(1, 10, 1234)
    assert shuffle.rows(0, 0, 10).tolist() == [8, 1, 6, 2, 0, 3, 5, 7, 4, 9]
    assert shuffle.rows(1, 2, 5).tolist() == [6, 7, 0, 5, 4]


def test_versions():
    assert LATEST_ORDER == 2 and isinstance(shuffle_of(2, 10, 0), Feistel)
    with pytest.raises(ValueError, match="version 3 of the order of the data, expected 1 to 2"):
        shuffle_of(3, 10, 0)


@pytest.mark.parametrize(
    ("num_rows", "first", "count", "message"),
    [
        (0, 0, 0, "an epoch of 0 rows, expected 1 to"),
        (2**48 + 1, 0, 1, "expected 1 to 2.48 = 281474976710656"),
        (10, 8, 3, "3 positions from 8 on, expected some of the epoch's 10"),
        (10, -1, 3, "3 positions from -1 on"),
        (10, 1, -3, "-3 positions from 1 on"),
    ],
)
def test_positions_outside_are_refused(num_rows, first, count, message):
    with pytest.raises(ValueError, match=message):
        Feistel(num_rows, 0).rows(0, first, count)


def rests_during(action):
    """How many short rests this thread gets while another one does something."""
    thread, num_rests = threading.Thread(target=action), 0
    thread.start()
    while thread.is_alive():
        time.sleep(1e-4)
        num_rests += 1
    return num_rests


@pytest.mark.slow
def test_other_threads_run_during_a_large_draw():
    numbers = np.random.default_rng(0).permutation(1_000_000).tolist()
    held = rests_during(lambda: sorted(numbers))  # does not let others run
    assert 3 * max(held, 7) < rests_during(lambda: Feistel(10**9, 1).rows(0, 0, 20_000_000))


@pytest.mark.slow
def test_a_step_is_drawn_in_milliseconds():
    """A bound that a busy machine keeps; what was measured: docs/benchmarks.md."""
    times = []
    for epoch in range(9):
        began = time.perf_counter()
        Feistel(200_000_000, 1).rows(epoch, 10**8, 60_000)
        times.append(time.perf_counter() - began)
    assert statistics.median(times) < 0.1

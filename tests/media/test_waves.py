"""Which slots of micro-batches a wave has."""

import itertools
import math

import numpy as np
import pytest

from megatron_hdp.media.waves import even_starts, fitting_starts, wave_choices, waves_of


@pytest.mark.parametrize("num_slots", [*range(1, 70), 1000])
def test_waves_are_short_where_ranks_of_a_pipeline_wait(num_slots):
    one, *others = wave_choices(num_slots)
    assert one.tolist() == [0] and len({one.tobytes() for one in others}) == len(others)
    for starts in others:
        assert starts[0] == 0 and (np.diff([*starts, num_slots]) > 0).all()
        assert len(starts) <= 2 * math.log2(num_slots) + 2
    if num_slots > 3:
        sizes = np.diff([*others[-1], num_slots])
        assert sizes[0] == sizes[-1] == 1


def test_known_waves():
    assert [0, 1, 2, 4, 8, 12, 14, 15] in [one.tolist() for one in wave_choices(16)]
    assert even_starts(8, 3).tolist() == [0, 2, 5]
    assert even_starts(2, 5).tolist() == [0, 1]


def test_waves_without_items_are_left_out():
    slots = np.array([7, 0, 3, 7], dtype=np.int32)
    assert waves_of(slots, np.array([0, 1, 2, 4])).tolist() == [2, 0, 1, 2]


@pytest.mark.parametrize("seed", range(20))
def test_fewest_waves_that_fit(seed):
    """No greedy choice is beaten by any other cut between the slots of a wave."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 10, 7)

    def rows_of(begin, end):
        return int(rows[begin:end].sum())

    starts, most = np.array([0, 4]), int(rng.integers(rows.max(), 30))
    found = fitting_starts(starts, 7, rows_of, most).tolist()
    assert set(starts) <= set(found) and found == sorted(set(found))
    fits = [
        [*cut]
        for cut in itertools.chain.from_iterable(
            itertools.combinations(range(7), num) for num in range(1, 8)
        )
        if {0, 4} <= {*cut}
        and all(rows_of(*pair) <= most for pair in itertools.pairwise([*cut, 7]))
    ]
    assert found in fits and len(found) == min(map(len, fits))


def test_a_slot_of_too_many_rows_is_refused():
    rows = [3, 9, 2]
    with pytest.raises(ValueError, match=r"found 9 rows of items in micro-batch 1 .* at most 8"):
        fitting_starts(np.array([0]), 3, lambda begin, end: sum(rows[begin:end]), 8)

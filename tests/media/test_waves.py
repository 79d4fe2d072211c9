"""Which slots of micro-batches a wave has."""

import math

import numpy as np
import pytest

from megatron_hdp.media.waves import even_starts, wave_starts, waves_of


@pytest.mark.parametrize("num_slots", [*range(1, 70), 1000])
def test_waves_are_short_where_ranks_of_a_pipeline_wait(num_slots):
    assert wave_starts(num_slots, 1).tolist() == [0]
    starts = wave_starts(num_slots, 4)
    sizes = np.diff([*starts, num_slots])
    assert starts[0] == 0 and (sizes > 0).all() and sizes[0] == sizes[-1] == 1
    assert len(starts) <= 2 * math.log2(num_slots) + 2
    grow, shrink = sizes[: len(sizes) // 2], sizes[len(sizes) // 2 :]
    assert (np.diff(grow) >= 0).all() and (np.diff(shrink[1:]) <= 0).all()


def test_known_waves():
    assert wave_starts(16, 2).tolist() == [0, 1, 2, 4, 8, 12, 14, 15]
    assert even_starts(8, 3).tolist() == [0, 2, 5]
    assert even_starts(2, 5).tolist() == [0, 1]


def test_waves_without_items_are_left_out():
    slots = np.array([7, 0, 3, 7], dtype=np.int32)
    assert waves_of(slots, np.array([0, 1, 2, 4])).tolist() == [2, 0, 1, 2]

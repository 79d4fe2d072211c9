"""Patches know their grid."""

import numpy as np
import pytest

from megatron_hdp.media import Patches
from megatron_hdp.session import MediaItem
from megatron_hdp.session.batch import _digest


@pytest.mark.parametrize(
    ("shape", "grid"), [((6, 12), (1, 2, 4)), ((8, 4, 3), (1, 2, 4)), ((0, 12), (0, 2, 4))]
)
def test_a_grid_that_is_none(shape, grid):
    with pytest.raises(ValueError, match="in a grid of . x 2 x 4"):
        Patches(np.zeros(shape, dtype=np.uint8), grid)


def test_ranks_compare_values_and_grid():
    """Ranks with other patches are told apart."""

    def digest(values, grid=(1, 40, 50)):
        return _digest([MediaItem(0, 0, Patches(values, grid))])

    values = np.zeros((2000, 12), dtype=np.uint8)
    other = values.copy()
    other[1000, 6] = 1  # what numpy does not print
    assert digest(values) == digest(values.copy())
    assert len({digest(values), digest(other), digest(values, (1, 50, 40))}) == 3

"""Models of pictures and text: gradients of model and encoder are those of one rank."""

import pytest

from tests.session.test_exactness import TOLERANCE
from tests.support.family_media import ITEMS_OF
from tests.support.media import errors_of
from tests.support.own_loop import arguments_of

SLOW = pytest.mark.slow
WIDE = {"kv_channels": 12, "num_layers": 4}
LLM = ("embedding.*", "decoder.layers.*", "output_layer.*")


def arguments_with(overrides=None):
    """Heads with six frequencies, and layers enough for deepstack on each first stage."""
    return arguments_of(**(WIDE | (overrides or {})))


@pytest.mark.parametrize("family", ITEMS_OF)
def test_rings(run_ranks, family):
    """Items across the slices of rings."""
    errors, calls = run_ranks(3, errors_of, arguments_with(), (None, 0), family=family)[0]
    assert all(error < TOLERANCE for error in errors.values()), errors
    assert sum(bool(rank) for rank in calls) == 3

"""Bridge's loop on two ranks under HDP against Bridge's own on one: losses of every step."""

import importlib.util

import numpy as np
import pytest

from tests.bridge.loop import HOW, trained, write_rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
HDP = {"hdp_tokens_per_rank": 256}


@pytest.fixture
def rows(tmp_path):
    """A folder of questions and answers."""
    if importlib.util.find_spec("megatron.bridge") is None:
        pytest.skip(HOW)
    write_rows(tmp_path / "rows")
    return tmp_path / "rows"


def test_losses_are_those_of_one_rank_without_it(run_ranks, rows):
    """In training, with norms of gradients, and in validation."""
    (expected,) = run_ranks(1, trained, rows, steps=4, timeout_s=500)
    found = run_ranks(2, trained, rows, HDP, steps=4, timeout_s=500)
    assert len(expected["steps"]) == 4
    for of_rank in found:
        np.testing.assert_allclose(of_rank["steps"], expected["steps"], rtol=2e-5)
        np.testing.assert_allclose(of_rank["validation"], expected["validation"], rtol=1e-5)

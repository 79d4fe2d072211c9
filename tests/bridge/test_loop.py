"""Bridge's loop on two ranks under HDP against Bridge's own on one: losses of every step."""

import numpy as np
import pyarrow.parquet
import pytest
import torch

from tests.bridge.loop import ROWS, require_bridge, trained, write_rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
HDP, LONG = {"hdp_tokens_per_rank": 256}, {"timeout_s": 500}


@pytest.fixture
def rows(tmp_path):
    """A folder of questions and answers."""
    require_bridge()
    write_rows(tmp_path / "rows")
    return tmp_path / "rows"


def require_same(found, expected):
    """Step, loss and norm of the gradient, and losses of validation."""
    np.testing.assert_allclose(found["steps"], expected["steps"], rtol=2e-5)
    np.testing.assert_allclose(found["validation"], expected["validation"], rtol=1e-5)


def test_losses_are_those_of_one_rank_and_a_resumed_run_has_them_too(run_ranks, rows, tmp_path):
    """With the distributed optimizer, in training and in validation."""
    (expected,) = run_ranks(1, trained, rows, steps=4, **LONG)
    assert len(expected["steps"]) == 4 and len(expected["validation"]) == 3
    folder = str(tmp_path / "checkpoints")
    found = run_ranks(2, trained, rows, HDP, steps=4, sharded=True, save=folder, **LONG)
    again = run_ranks(2, trained, rows, HDP, steps=4, sharded=True, load=folder, **LONG)
    for whole, resumed in zip(found, again, strict=True):
        require_same(whole, expected)
        assert resumed["steps"] == whole["steps"][2:], "the second half, bit for bit"


@pytest.mark.parametrize("name", ["tensor", "pipeline"])
def test_with_ranks_that_share_a_model(run_ranks, rows, name):
    """Two replicas of two ranks under HDP against one without it."""
    layout = {f"{name}_model_parallel_size": 2}
    if name == "pipeline":
        layout["pipeline_dtype"] = torch.float32
    expected = run_ranks(2, trained, rows, steps=4, **layout, **LONG)[-1]
    found = run_ranks(4, trained, rows, HDP, steps=4, sharded=True, **layout, **LONG)[-1]
    np.testing.assert_allclose(found["steps"], expected["steps"], rtol=2e-4)
    losses = [[loss for _, loss, _ in one["steps"]] for one in (found, expected)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    np.testing.assert_allclose(found["validation"], expected["validation"], rtol=1e-5)


def test_packed_sequences_are_trained_as_single_ones(run_ranks, rows):
    """An epoch a step: rows that Bridge has packed against the same, not packed, on one rank."""
    (expected,) = run_ranks(1, trained, rows, steps=3, samples=ROWS, **LONG)
    run_ranks(2, trained, rows, HDP, steps=1, samples=2, packed=True, **LONG)  # packs them
    (path,) = rows.glob("packed/*/training_*.parquet")
    num_packs = pyarrow.parquet.read_table(path).num_rows
    assert num_packs < ROWS / 4
    found = run_ranks(2, trained, rows, HDP, steps=3, samples=num_packs, packed=True, **LONG)
    for of_rank in found:
        require_same(of_rank, expected)


def test_checkpoints_beside_training_are_those_of_their_step(run_ranks, rows, tmp_path):
    """Asynchronous saves: a run resumed from one repeats its steps bit for bit."""
    how = {"steps": 4, "sharded": True, "save": str(tmp_path / "checkpoints"), **LONG}
    found = run_ranks(2, trained, rows, HDP, beside=True, **how)
    how |= {"save": None, "load": how["save"]}
    again = run_ranks(2, trained, rows, HDP, **how)
    for whole, resumed in zip(found, again, strict=True):
        assert len(whole["steps"]) == 4 and resumed["steps"] == whole["steps"][2:]

"""What items cost, learnt from the steps of all ranks."""

import numpy as np
import pytest

from megatron_hdp.media import ItemCostModel
from megatron_hdp.media.learnt_cost import LearntCost

SHAPE = ItemCostModel(patch_s=1e-6, patch2_s=1e-10, pack_s=1e-3, gathered_s_per_patch=1e-8)
NAMES = ("patch_s", "patch2_s", "pack_s")


def seen(true, seed, noise=0.0, ranks=8):
    """Work of ranks by chance, and what it takes."""
    rng = np.random.default_rng(seed)
    columns = (
        rng.uniform(1e4, 1e5, ranks),
        rng.uniform(1e7, 1e9, ranks),
        rng.integers(1, 6, ranks),
    )
    work = np.stack(columns, axis=1).astype(np.float64)
    seconds = work @ np.array(true) * (1 + noise * rng.standard_normal(ranks))
    return np.column_stack([work, seconds])


def after(tables, behind=2):
    """The cost of the first step that may depend on all of them."""
    learnt = LearntCost(SHAPE, behind)
    for step, table in enumerate(tables):
        learnt.observe(step, table)
    return learnt.of_step(len(tables) - 1 + behind)


@pytest.mark.parametrize("true", [(3e-6, 3e-10, 3e-3), (3e-6, 1e-10, 5e-3), (5e-7, 4e-10, 3e-4)])
def test_it_comes_near_what_is_true(true):
    """Exact where the encoder is faster or slower as a whole; else within what is told apart."""
    found = after([seen(true, seed, noise=0.02) for seed in range(20)])
    assert found.gathered_s_per_patch / SHAPE.gathered_s_per_patch == pytest.approx(
        found.patch_s / SHAPE.patch_s
    )
    for table in (seen(true, 100 + seed) for seed in range(5)):
        told = table[:, :3] @ np.array([getattr(found, name) for name in NAMES])
        assert told == pytest.approx(table[:, 3], rel=0.1)
        by_shape = table[:, :3] @ np.array([getattr(SHAPE, name) for name in NAMES])
        assert np.abs(by_shape / table[:, 3] - 1).max() > 0.4


def test_what_steps_do_not_tell_apart_keeps_its_proportions():
    """Equal items and calls on every rank: the encoder takes twice as long, whatever it is."""
    table = np.array([[4e4, 4e8, 2, 0.0]] * 4)
    table[:, 3] = 2 * table[:, :3] @ np.array([getattr(SHAPE, name) for name in NAMES])
    found = after([table] * 5)
    for name in NAMES:
        assert getattr(found, name) == pytest.approx(2 * getattr(SHAPE, name))


def test_a_step_depends_on_none_that_may_be_running():
    learnt = LearntCost(SHAPE, 2)
    learnt.observe(3, seen((3e-6, 3e-10, 3e-3), 0))
    assert learnt.of_step(4) == SHAPE
    first = learnt.of_step(5)
    assert first != SHAPE
    learnt.observe(4, seen((9e-6, 9e-10, 9e-3), 1))
    assert learnt.of_step(5) == first != learnt.of_step(6)
    for step in range(5, 40):
        learnt.observe(step, np.zeros((4, 4)))  # nobody encoded whole items alone
    assert learnt.of_step(41) == learnt.of_step(42) != SHAPE


def test_ranks_that_wait_say_nothing():
    table = seen((3e-6, 3e-10, 3e-3), 0)
    waits = np.vstack([table, [[0.0, 0.0, 0.0, 100.0]], [[1e4, 1e8, 1.0, 0.0]]])
    assert after([waits]) == after([table])


def test_no_coefficient_is_negative():
    """Ranks whose large items were quick by chance."""
    table = np.array([[1e4, 1e9, 1, 0.01], [1e4, 1e7, 1, 0.03], [2e4, 2e9, 1, 0.02]])
    found = after([table])
    assert min(getattr(found, name) for name in NAMES) >= 0

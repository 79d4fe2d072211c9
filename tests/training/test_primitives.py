"""Runs with functions of the user's own as primitives, the documented example first."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.ranks import RankError
from tests.support.sources import WEIGHTS, data_file, mixed_arguments, write_sources
from tests.training.test_mixture import trained

EXAMPLE = Path(__file__).parents[2] / "configs/primitives/follow_the_loss.py"
OTHERS = """
import numpy as np
from megatron_hdp.planner import plan

def cost(lengths):
    return 1e-6 * lengths + 1e-8 * np.minimum(lengths, 32).astype(float) * lengths

def balance(lengths, settings):
    return plan(lengths, ranks=settings.num_ranks, tokens_per_rank=settings.tokens_per_rank,
                strategy="naive", max_length=settings.max_length, cost_model=settings.cost_model,
                slice_multiple=settings.slice_multiple)

def distribute(made, position, settings):
    return (np.arange(made.num_ranks) + position.steps) % made.num_ranks

def broadcast_at(from_plane):
    return ["tensor"] if from_plane else []

def broken(weights, position, losses):
    return {"web": losses[0]["nowhere"]}
"""


@pytest.fixture
def folder(tmp_path):
    shutil.copy(EXAMPLE, tmp_path)
    (tmp_path / "others.py").write_text(OTHERS)
    return write_sources(tmp_path)


def run(folder, primitives, **overrides):
    more = f"{WEIGHTS}\nprimitives: {{{primitives}}}" if primitives else WEIGHTS
    settings = {"train_iters": 8, "lr_decay_iters": 8, "global_batch_size": 6, "lr": 1e-2}
    settings["hdp_tokens_per_rank"] = 100
    return mixed_arguments(folder, data_file(folder, more), **(settings | overrides))


def tokens(found):
    """Of each source in each step."""
    return [{name: one.tokens for name, one in step.sources.items()} for step in found]


MIX = "mix: follow_the_loss.py:mix, losses-behind: 2"


def test_a_mixture_follows_the_loss_and_a_run_goes_on_exactly(run_ranks, folder):
    whole = run(folder, MIX, save=folder / "saved", save_interval=5)
    (expected, _), *_ = run_ranks(2, trained, whole)
    (plain, _), *_ = run_ranks(2, trained, run(folder, ""))
    assert tokens(expected)[:2] == tokens(plain)[:2]  # too early to tell
    assert tokens(expected) != tokens(plain)
    resumed = replace(whole, save=None, save_interval=None, load=folder / "saved", ckpt_step=5)
    (found, _), *_ = run_ranks(2, trained, resumed)
    assert [(one.step, one.loss) for one in found] == [(one.step, one.loss) for one in expected[5:]]
    assert tokens(found) == tokens(expected)[5:]


def test_the_others_change_the_plan_and_not_what_is_learnt(run_ranks, folder):
    named = (
        "cost: others.py:cost, balance: others.py:balance, distribute: others.py:distribute, "
        "broadcast-at: others.py:broadcast_at"
    )
    layout = {"tensor_model_parallel_size": 2, "train_iters": 3}
    (expected, _), *_ = run_ranks(4, trained, run(folder, "", **layout))
    (found, _), *_ = run_ranks(4, trained, run(folder, named, **layout))
    assert tokens(found) == tokens(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-9)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-9)
    planned = [one.planned_efficiency for one in found]
    assert planned != [one.planned_efficiency for one in expected]


def test_a_function_that_fails_ends_the_run_with_its_place(run_ranks, folder):
    with pytest.raises(RankError) as caught:
        run_ranks(1, trained, run(folder, "mix: others.py:broken, losses-behind: 2"))
    assert "others.py:broken raised IndexError: list index out of range in " in str(caught.value)


@pytest.mark.slow
def test_a_data_plane_follows_alike(run_ranks, folder):
    pytest.importorskip("ray", reason="no Ray: pip install 'megatron-hdp[ray]'")
    named = f"{MIX.replace('2', '4')}, distribute: others.py:distribute, cost: others.py:cost"
    local = run(folder, named)
    (expected, _), *_ = run_ranks(2, trained, local)
    (found, _), *_ = run_ranks(2, trained, replace(local, hdp_loaders="ray"))
    assert tokens(found) == tokens(expected)
    assert [(one.loss, one.grad_norm) for one in found] == [
        (one.loss, one.grad_norm) for one in expected
    ]

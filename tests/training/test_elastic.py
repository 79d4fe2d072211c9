"""A run of four ranks that is killed continues on other ranks and layouts with the same steps."""

import os
import signal
from dataclasses import replace
from unittest import mock

import pytest

from megatron_hdp.megatron.checkpoint.checkpoints import Checkpoints
from megatron_hdp.megatron.checkpoint.folder import CheckpointFolder
from tests.support.gradients import moe_arguments, write_corpus
from tests.training.test_checkpoint import (
    BUCKETS,
    LENGTHS,
    SHARDED,
    curve,
    largest_difference,
    run,
)
from tests.training.test_sigkill import ForkedLaunch, wait_until

TENSOR = {"tensor_model_parallel_size": 2}
SEQUENCE = TENSOR | {"sequence_parallel": True}
STAGES = {"pipeline_model_parallel_size": 2}


def killed_run(run_ranks, folder, overrides):
    """Four ranks that are killed in the fourth step or later; arguments and the whole curve."""
    capacity = {"hdp_tokens_per_rank": 128}
    whole = run(write_corpus(folder, LENGTHS), **capacity, **overrides)
    expected = run_ranks(4, curve, whole)[0]
    saving = replace(whole, save=folder / "checkpoints", save_interval=3)
    launch = ForkedLaunch(run_ranks, saving, folder, num_ranks=4)
    wait_until(lambda: CheckpointFolder(saving.save).latest(), launch, "a checkpoint")
    for pid in launch.pids():
        os.kill(pid, signal.SIGKILL)
    launch.wait()
    return replace(whole, load=saving.save, ckpt_step=3), expected


@pytest.fixture(scope="module")
def replicated(run_ranks, tmp_path_factory):
    return killed_run(run_ranks, tmp_path_factory.mktemp("replicated"), {})


@pytest.fixture(scope="module")
def sharded(run_ranks, tmp_path_factory):
    return killed_run(run_ranks, tmp_path_factory.mktemp("sharded"), SHARDED | BUCKETS)


LAYOUTS = {
    "2": (2, {}),
    "3": (3, {}),
    "6": (6, {}),
    "2-tp2": (2, TENSOR),
    "4-tp2-sp": (4, SEQUENCE),
    "2-pp2": (2, STAGES),
    "6-pp2": (6, STAGES),
    "4-tp2-sp-pp2": (4, SEQUENCE | STAGES),
}
QUICK = [("sharded", "4-tp2-sp-pp2")]


@pytest.mark.parametrize(
    "kind, layout",
    [
        pytest.param(kind, layout, marks=() if (kind, layout) in QUICK else pytest.mark.slow)
        for kind in ("replicated", "sharded")
        for layout in LAYOUTS
    ],
)
def test_four_ranks_continue_on_another_layout(run_ranks, request, kind, layout):
    stopped, expected = request.getfixturevalue(kind)
    num_ranks, overrides = LAYOUTS[layout]
    found = run_ranks(num_ranks, curve, replace(stopped, **overrides))[0]
    assert [step for step, _ in found] == [4, 5, 6]
    assert largest_difference(found, expected[3:]) <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [{}, SHARDED | BUCKETS], ids=["replicated", "sharded"])
def test_another_layout_continues_on_one_rank(run_ranks, tmp_path, overrides):
    """The other way round: saved with tensor ranks and stages, loaded without."""
    whole = run(write_corpus(tmp_path, LENGTHS), hdp_tokens_per_rank=200, **overrides)
    expected = run_ranks(1, curve, whole)[0]
    folder = tmp_path / "checkpoints"
    stopped = replace(whole, train_iters=3, save=folder, **SEQUENCE, **STAGES)
    run_ranks(4, curve, stopped)
    found = run_ranks(1, curve, replace(whole, load=folder))[0]
    assert largest_difference(found, expected[3:]) <= 1e-10


EXPERTS_APART = {"expert_model_parallel_size": 2}
ONE_EACH = {"expert_model_parallel_size": 4}
EXPERT_LAYOUTS = {
    "4-ep4": (4, ONE_EACH),
    "4-ep2-tp2-sp": (4, EXPERTS_APART | SEQUENCE | {"expert_tensor_parallel_size": 1}),
    "4-ep2-pp2": (4, EXPERTS_APART | STAGES),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [{}, SHARDED | BUCKETS], ids=["replicated", "sharded"])
@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_experts_continue_on_another_layout(run_ranks, tmp_path, layout, kind):
    prefix = write_corpus(tmp_path, LENGTHS)
    apart = run(prefix, moe_arguments, hdp_tokens_per_rank=128, **EXPERTS_APART, **kind)
    folder = tmp_path / "checkpoints"
    expected = run_ranks(2, curve, replace(apart, save=folder, save_interval=3))[0]
    num_ranks, overrides = EXPERT_LAYOUTS[layout]
    resumed = replace(apart, load=folder, ckpt_step=3, **overrides)
    found = run_ranks(num_ranks, curve, resumed)[0]
    assert largest_difference(found, expected[3:]) <= 1e-10


def test_a_skipped_sequence_fails_the_check(run_ranks, sharded):
    """The planted fault: the data goes on one sequence too late."""
    stopped, expected = sharded
    found = run_ranks(2, curve_of_later_data, stopped)[0]
    assert largest_difference(found, expected[3:]) > 1e-6


def curve_of_later_data(arguments):
    load = Checkpoints.load

    def load_later(self):
        progress = load(self)
        found = progress.position
        later = {name: replace(one, rows=one.rows + 1) for name, one in found.sources.items()}
        return replace(progress, position=replace(found, sources=later))

    with mock.patch.object(Checkpoints, "load", load_later):
        return curve(arguments)

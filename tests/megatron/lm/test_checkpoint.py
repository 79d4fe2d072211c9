"""Whether a run may go on from Megatron-LM's checkpoint: only in the order that it began with."""

import tempfile
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor

from megatron_hdp.data import LATEST_ORDER
from megatron_hdp.megatron.cpu import shim
from megatron_hdp.megatron.lm import checkpoint, replacements
from megatron_hdp.megatron.releases import own_checkpoint_writer
from tests.support.gradients import tiny_arguments, write_corpus
from tests.support.older import order_before_mixtures


@pytest.fixture
def arguments(tmp_path):
    return tiny_arguments(write_corpus(tmp_path, [3, 50, 20, 7, 9, 30, 11, 2, 40, 5]))


def versions(order):
    return [one.version for one in order.sources.values()]


def saved_by(arguments):
    args = SimpleNamespace(consumed_train_samples=30, global_batch_size=10)
    checkpoint.remember(checkpoint.data_order(arguments), args)
    return args


HERE = SimpleNamespace(load="checkpoints")


def test_the_same_order_goes_on_whatever_the_plan(arguments):
    other_plan = replace(arguments, hdp_strategy="static", hdp_tokens_per_rank=64)
    with mock.patch.object(checkpoint, "say") as say:
        args = SimpleNamespace(load="checkpoints")
        checkpoint.continue_order(args, other_plan, saved_by(arguments))
    assert versions(checkpoint.order_of_run(args, other_plan)) == [LATEST_ORDER]
    say.assert_not_called()


def test_an_older_checkpoints_version_goes_on(arguments):
    saved, args = saved_by(arguments), SimpleNamespace(load="checkpoints")
    saved.hdp_data_order = order_before_mixtures(saved.hdp_data_order)
    with mock.patch.object(checkpoint, "say") as say:
        checkpoint.continue_order(args, arguments, saved)
    assert versions(checkpoint.order_of_run(args, arguments)) == [1]
    assert checkpoint.position_of(args, "train").sources["corpus"].rows == 30
    say.assert_called_once()
    saved.hdp_data_order["version"] = LATEST_ORDER + 1
    with pytest.raises(ValueError, match="--load checkpoints has version 3 of the order"):
        checkpoint.continue_order(args, arguments, saved)


def test_a_run_that_begins_now_has_the_latest_version(arguments):
    assert versions(checkpoint.order_of_run(SimpleNamespace(), arguments)) == [LATEST_ORDER]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 99}, "--seed: found 99, expected"),
        ({"split": "50,50,0"}, "sequences to train on .--split"),
        ({"hdp_long_sequence": "split"}, r"--hdp-long-sequence\): found split, expected"),
    ],
)
def test_another_order_is_refused(arguments, changed, message):
    with pytest.raises(ValueError, match=message) as info:
        checkpoint.continue_order(HERE, replace(arguments, **changed), saved_by(arguments))
    assert "--load checkpoints" in str(info.value) and "--finetune" in str(info.value)


def test_with_and_without_hdp_are_two_orders(arguments):
    stock = SimpleNamespace(consumed_train_samples=8)
    checkpoint.continue_order(HERE, None, stock)
    checkpoint.continue_order(HERE, arguments, SimpleNamespace(consumed_train_samples=0))
    with pytest.raises(ValueError, match="found a run with --hybrid-data-parallel, expected one w"):
        checkpoint.continue_order(HERE, arguments, stock)
    with pytest.raises(ValueError, match="found a run without --hybrid-data-parallel, expected"):
        checkpoint.continue_order(HERE, None, saved_by(arguments))


def test_tokens_are_counted_on():
    first, second = SimpleNamespace(), SimpleNamespace()
    assert [checkpoint.count_tokens(first, 5), checkpoint.count_tokens(first, 6)] == [5, 11]
    checkpoint.restore_tokens(second, first)
    assert checkpoint.count_tokens(second, 1) == 12


def save_and_load(folder, reports, is_async):
    """Body of a rank: a save under HDP; returns what it leaves, and what was saved."""
    shim.apply()
    tempfile.tempdir = str(reports)
    job = SimpleNamespace(saving=nullcontext)
    run = SimpleNamespace(args=SimpleNamespace(lora_rank=None))
    with mock.patch.multiple(replacements, _run=run, _job=job):
        request = replacements.save(
            dist_checkpointing.save,
            {"weights": ShardedTensor.from_rank_offsets("weights", torch.arange(5.0))},
            str(folder),
            async_sharded_save=is_async,
            **own_checkpoint_writer(),
        )
        if is_async:
            request.execute_sync()
    left = [str(one) for one in (*psutil.Process().children(), *reports.iterdir())]
    empty = ShardedTensor.from_rank_offsets("weights", torch.zeros(5))
    loaded = dist_checkpointing.load({"weights": empty}, str(folder))
    return left, loaded["weights"].tolist()


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.slow
def test_saving_leaves_no_process_and_no_file(run_ranks, tmp_path, is_async):
    """A process would print its stack at the rank's end, and outlive a rank that is killed."""
    folder, reports = tmp_path / "checkpoint", tmp_path / "reports"
    folder.mkdir(), reports.mkdir()
    ((left, weights),) = run_ranks(1, save_and_load, folder, reports, is_async)
    assert left == [] and weights == [0, 1, 2, 3, 4]

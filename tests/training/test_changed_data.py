"""Tokens that change under a run: another ``.bin`` at a restart, or one that is cut."""

import os
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from megatron_hdp.data import TokenReader
from megatron_hdp.megatron.checkpoint.state import TrainingState
from megatron_hdp.training.loop import pretrain
from tests.support.gradients import tiny_arguments, write_corpus
from tests.support.ranks import RankError

LENGTHS = [30, 60, 20, 33, 21, 50, 64, 3]


def steps_of(arguments):
    """Body of a rank: the steps that ran."""
    return [metrics.step for metrics in pretrain(arguments)]


def steps_of_an_older_release(arguments):
    """Body of a rank: the same, saving what a release wrote that knew no contents."""
    content = TrainingState.content

    def without_contents(self, progress):
        saved = content(self, progress)
        (source,) = saved["megatron_hdp"]["order"]["sources"].values()
        source["contents"] = None
        return saved

    with mock.patch.object(TrainingState, "content", without_contents):
        return steps_of(arguments)


def steps_until_cut(arguments):
    """Body of a rank: the same; after a few reads the file is cut."""
    read = TokenReader.read
    num_read = 0

    def cut_after_some(self, *span):
        nonlocal num_read
        num_read += 1
        if num_read == 5:
            os.truncate(f"{self.prefix}.bin", 100)
        return read(self, *span)

    with mock.patch.object(TokenReader, "read", cut_after_some):
        return steps_of(arguments)


@pytest.fixture
def run(tmp_path):
    prefix = write_corpus(tmp_path, LENGTHS)
    folder = tmp_path / "checkpoints"
    return tiny_arguments(prefix, global_batch_size=2, train_iters=2, lr_decay_iters=9, save=folder)


@pytest.mark.parametrize(
    ("saving", "message"),
    [
        (steps_of, r"fingerprint of samples of its tokens or text: found \d+, expected \d+"),
        (steps_of_an_older_release, None),
    ],
)
def test_another_bin_under_the_same_idx_is_not_resumed(run_ranks, run, saving, message):
    assert run_ranks(1, saving, run) == [[1, 2]]
    path = Path(f"{run.data_path[0]}.bin")
    path.write_bytes(path.read_bytes()[:-2] + b"\x01\x00")
    resumed = replace(run, load=run.save, train_iters=3)
    if message is None:
        assert run_ranks(1, steps_of, resumed) == [[3]]
        return
    with pytest.raises(RankError, match=message):
        run_ranks(1, steps_of, resumed)


def test_a_bin_that_is_cut_ends_the_run_with_its_name(run_ranks, run):
    with pytest.raises(RankError, match=r"corpus\.bin has 100 bytes while .* its \.idx promises"):
        run_ranks(1, steps_until_cut, replace(run, save=None, train_iters=20))

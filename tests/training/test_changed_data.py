"""Data under a run: another ``.bin`` at a restart, a cut one, the order that it began with."""

import io
import os
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from megatron_hdp.data import DataOrder, TokenReader
from megatron_hdp.megatron.checkpoint.state import TrainingState
from megatron_hdp.training.loop import pretrain
from tests.support.gradients import tiny_arguments, write_corpus
from tests.support.older import order_before_mixtures
from tests.support.ranks import RankError

LENGTHS = [30, 60, 20, 33, 21, 50, 64, 3]


@contextmanager
def saving_otherwise(change):
    """Within the block checkpoints hold what another release would have saved."""
    content = TrainingState.content

    def changed(self, progress):
        saved = content(self, progress)
        (source,) = saved["megatron_hdp"]["order"]["sources"].values()
        change(saved["megatron_hdp"], source)
        return saved

    with mock.patch.object(TrainingState, "content", changed):
        yield


def steps_of(arguments):
    """Body of a rank: the steps that ran."""
    return [metrics.step for metrics in pretrain(arguments)]


def steps_of_an_older_release(arguments):
    """Body of a rank: the same, saving what a release wrote that knew no contents."""

    def without_contents(ours, source):
        source["contents"] = None

    with saving_otherwise(without_contents):
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


STEPS = 6
ANNOUNCED = "began with version 1 of the order of the data (now 2): it resumes in that one"


def curve(arguments):
    """Body of a rank: losses of every step, and how often the older version was announced."""
    log = io.StringIO()
    with redirect_stdout(log):
        found = [(one.step, one.loss, one.validation_loss) for one in pretrain(arguments)]
    return found, log.getvalue().count(ANNOUNCED)


def curve_of_an_older_release(arguments):
    """Body of a rank: the same, in a release that knew no other version than the first."""

    def without_version(ours, source):
        assert (source["version"], source["key"]) == (1, 0)
        ours["order"] = order_before_mixtures(ours["order"])
        del ours["position"]

    with (
        mock.patch("megatron_hdp.data.mixture.source.LATEST_ORDER", 1),
        saving_otherwise(without_version),
    ):
        return curve(arguments)


def curve_of_a_newer_release(arguments):
    """Body of a rank: the same, saving a version that nobody knows here."""

    def with_version(ours, source):
        source["version"] = 3

    with saving_otherwise(with_version):
        return curve(arguments)


def curve_in_the_latest_version(arguments):
    """Body of a rank, the planted fault: what the checkpoint says is not heeded."""
    continuing = DataOrder.continuing

    def forgetting(self, saved, source):
        return replace(continuing(self, saved, source), order=self)

    with mock.patch.object(DataOrder, "continuing", forgetting):
        return curve(arguments)


@pytest.fixture
def long_run(tmp_path):
    settings = {"global_batch_size": 3, "train_iters": STEPS, "lr_decay_iters": STEPS, "lr": 1e-2}
    validation = {"split": "1,1,0", "eval_iters": 1, "eval_interval": 1}
    return tiny_arguments(write_corpus(tmp_path, 2 * LENGTHS), **settings, **validation)


def close(found, expected):
    return found == [pytest.approx(one, rel=1e-10) for one in expected]


@pytest.mark.slow
def test_a_run_of_an_older_release_keeps_its_order(run_ranks, long_run, tmp_path):
    folder = tmp_path / "checkpoints"
    expected, _ = run_ranks(
        1, curve_of_an_older_release, replace(long_run, save=folder, save_interval=2)
    )[0]
    resumed = replace(long_run, load=folder, ckpt_step=2)
    wrong, _ = run_ranks(1, curve_in_the_latest_version, resumed)[0]
    assert not close([one[:2] for one in wrong], [one[:2] for one in expected[2:]])
    # two ranks, then one again from what this release saved
    later = replace(resumed, save=tmp_path / "later", save_interval=2)
    (found, announced), (_, silent) = run_ranks(2, curve, replace(later, train_iters=4))
    assert close(found, expected[2:4]) and (announced, silent) == (1, 0)
    found, announced = run_ranks(1, curve, replace(long_run, load=tmp_path / "later"))[0]
    assert close(found, expected[4:]) and announced == 1


def test_a_run_that_begins_now_says_nothing(run_ranks, long_run, tmp_path):
    saving = replace(long_run, save=tmp_path / "checkpoints", save_interval=2, train_iters=2)
    assert run_ranks(1, curve, saving)[0][1] == 0
    assert run_ranks(1, curve, replace(long_run, load=saving.save, train_iters=3))[0][1] == 0


def test_a_version_that_this_release_does_not_know_is_refused(run_ranks, long_run, tmp_path):
    saving = replace(long_run, save=tmp_path / "checkpoints", save_interval=2, train_iters=2)
    run_ranks(1, curve_of_a_newer_release, saving)
    with pytest.raises(
        RankError, match="has version 3 of the order of the data of .*, expected 1 to 2"
    ):
        run_ranks(1, curve, replace(long_run, load=saving.save))

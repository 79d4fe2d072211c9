"""Ranks are killed with SIGKILL while they train and save; what is left continues all the same.

At moments drawn at random, most of them while a checkpoint is being written; their seed is printed.
In the end every step must stand in metrics.jsonl once, with the loss and the data position of a run
that nobody killed. And at every operation by which a save changes the disk, one after the other:
after each kill a new start goes on from the checkpoint before or from the new one, with the losses
of a run that nobody killed, and leaves nothing but whole checkpoints.
"""

import mmap
import os
import random
import shutil
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from unittest import mock

import psutil
import pytest

from megatron_hdp.megatron.checkpoint.checkpoints import Checkpoints
from megatron_hdp.megatron.checkpoint.folder import TRACKER, CheckpointFolder
from megatron_hdp.megatron.checkpoint.run_folder import RunFolder
from tests.support.gradients import write_corpus
from tests.support.processes import started, until
from tests.support.ranks import RankError
from tests.training.faults import train
from tests.training.runs import (
    LENGTHS,
    curve,
    folder,
    largest_difference,
    lines_of,
    long_flags,
    run,
)

__all__ = ["folder"]  # a fixture

NUM_RANKS = 2
DEADLINE_S = 300.0
MAX_STEPS = 3  # a launch is killed within so many steps of its first one


def train_in_place(argv):
    """Body of a rank with the planted fault: a checkpoint is the latest before it is written."""
    with (
        mock.patch.object(CheckpointFolder, "begin", begin_in_place),
        mock.patch.object(CheckpointFolder, "publish", _nothing),
        mock.patch.object(RunFolder, "_require_free", _nothing),
    ):
        train("0:0:none", argv)


def begin_in_place(self, iteration):
    place = self.path / f"iter_{iteration:07d}"
    place.mkdir(parents=True)
    (self.path / TRACKER).write_text(str(iteration))
    time.sleep(0.5)
    return place


def _nothing(*_):
    return None


def codes_of(folder, settings):
    """Exit codes of a run that nobody kills."""
    with started(NUM_RANKS, folder, train, "0:0:none", long_flags(folder, **settings)) as ranks:
        return [one.wait(DEADLINE_S) for one in ranks]


def num_steps_in(path):
    """Whole lines of a metrics file."""
    return path.read_text().count("\n") if path.exists() else 0


def kill_at_a_random_moment(ranks, settings, draw):
    """Waits for the moment, kills every rank, returns the helpers that outlive them."""
    path, save = settings["metrics_path"], settings["save"]
    target = num_steps_in(path) + 1 + draw.randrange(MAX_STEPS)
    if draw.random() < 0.7:
        pattern = f"iter_{target:07d}.partial-*"
        until(lambda: [*save.glob(pattern)], DEADLINE_S, ranks, 0.001)
        time.sleep(draw.uniform(0.0, 0.6))
    else:
        until(lambda: num_steps_in(path) >= target, DEADLINE_S, ranks, 0.001)
        time.sleep(draw.uniform(0.0, 0.3))
    running, helpers = [], []
    for one in ranks:
        with suppress(psutil.NoSuchProcess):  # the run has come to its end meanwhile
            running.append(psutil.Process(one.process.pid))
            helpers += running[-1].children(recursive=True)
    for rank in draw.sample(running, len(running)):
        with suppress(psutil.NoSuchProcess):
            rank.kill()
        time.sleep(draw.choice([0.0, 0.05]))
    for one in ranks:
        one.wait(DEADLINE_S)
    return helpers


def survive(folder, settings, num_kills):
    """Runs to the end through kills, each launch continuing what the last one left.

    Every second launch saves asynchronously.
    """
    seed = random.randrange(10**6)
    print(f"moments drawn with seed {seed}")
    draw, helpers = random.Random(seed), []
    try:
        for kill in range(num_kills):
            argv = long_flags(folder, **settings, async_save=kill % 2 == 0 or None)
            with started(NUM_RANKS, folder, train, "0:0:none", argv) as ranks:
                helpers += kill_at_a_random_moment(ranks, settings, draw)
        assert codes_of(folder, settings) == [0] * NUM_RANKS
    finally:
        for helper in helpers:  # the writers that outlived their rank
            with suppress(psutil.NoSuchProcess):
                helper.kill()


def killable(folder, num_kills):
    """A run that saves and reports every step and is long enough for the kills."""
    save, steps = folder / "checkpoints", MAX_STEPS * num_kills + 2
    settings = {"train_iters": steps, "lr_decay_iters": 100, "global_batch_size": 3, "lr": 1e-2}
    settings |= {"save": save, "load": save, "save_interval": 1, "hdp_tokens_per_rank": 60}
    return settings | {"metrics_path": folder / "metrics.jsonl", "distributed_timeout_minutes": 4}


OVERLAPPED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "num_layers": 2}


@pytest.mark.parametrize(
    ("num_kills", "more"),
    [
        pytest.param(2, {}, marks=pytest.mark.slow),
        pytest.param(24, OVERLAPPED, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
    ids=["few", "many"],
)
def test_a_run_survives_kills_at_random_moments(folder, num_kills, more):
    settings = killable(folder, num_kills) | more
    whole = dict.fromkeys(("save", "load", "save_interval"))
    whole |= {"metrics_path": folder / "uninterrupted.jsonl"}
    assert codes_of(folder, settings | whole) == [0] * NUM_RANKS
    survive(folder, settings, num_kills)
    found, expected = (lines_of(one["metrics_path"]) for one in (settings, whole))
    assert [record["step"] for record in found] == list(range(1, settings["train_iters"] + 1))
    for record, reference in zip(found, expected, strict=True):
        for key in ("consumed_sequences", "consumed_tokens"):
            assert record[key] == reference[key]
        assert record["loss"] == pytest.approx(reference["loss"], rel=1e-10)


@pytest.mark.slow
def test_writing_in_place_does_not_survive(folder):
    settings = killable(folder, 2)
    tracker = settings["save"] / TRACKER
    with started(NUM_RANKS, folder, train_in_place, long_flags(folder, **settings)) as ranks:
        until(lambda: tracker.exists() and tracker.read_text() == "2", DEADLINE_S, ranks, 0.001)
        for one in ranks:
            one.process.kill()
    assert 0 not in codes_of(folder, settings)


# Events of Python's audit hooks; the first argument is the path.
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link"}


def killed(arguments, number):
    """Body of a rank that is killed at the `number`-th change by the save of iteration 2."""
    rank, count = os.getpid(), mmap.mmap(-1, 8)  # shared with the writers that it forks
    armed = False

    def act():
        done = int.from_bytes(count[:8], "little")
        count[:8] = (done + 1).to_bytes(8, "little")
        if done >= number:
            os.kill(rank, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event, args):
        if not armed or not args or str(arguments.save) not in str(args[0]):
            return
        writes = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in CHANGES:
            act()

    def before(function):
        def changed(*args):
            if armed:
                act()
            return function(*args)

        return changed

    save = Checkpoints.save

    def armed_save(self, progress):
        nonlocal armed
        armed = armed or progress.iteration == 2
        save(self, progress)

    sys.addaudithook(hook)
    with (
        mock.patch.object(Checkpoints, "save", armed_save),
        mock.patch("os.fsync", before(os.fsync)),
    ):
        curve(arguments)


def curves(runs):
    """Body of a rank: the curve of each run, one after the other."""
    return [curve(arguments) for arguments in runs]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


KINDS = {"next": (1, 1), "first": (0, 2), "again": (2, 1)}  # what is there, steps between saves


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("async_save", [False, True], ids=["blocking", "asynchronous"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_kill_at_every_change(run_ranks, tmp_path, kind, async_save):
    held, interval = KINDS[kind]
    small = {"hidden_size": 8, "num_layers": 1, "ffn_hidden_size": 8, "kv_channels": 2}
    whole = run(write_corpus(tmp_path, LENGTHS), hdp_tokens_per_rank=100, train_iters=3, **small)
    (tmp_path / "template").mkdir()
    whole = replace(whole, save_interval=interval, async_save=async_save)
    expected = run_ranks(1, curve, replace(whole, save_interval=None, async_save=False))[0]
    if held:
        saving = replace(whole, train_iters=held, save=tmp_path / "template", async_save=False)
        run_ranks(1, curve, saving)
    folders = []
    for number in range(1000):
        folder = shutil.copytree(tmp_path / "template", tmp_path / f"killed-{number}")
        step = 1 if kind == "again" else None
        stopped = replace(whole, train_iters=2, load=folder, save=folder, ckpt_step=step)
        if not held:
            folder.rmdir()
        try:
            run_ranks(1, killed, stopped, number)
            break
        except RankError as error:
            assert "died with exit code -9" in str(error), error
        folders.append(folder)
    assert len(folders) > 20
    runs = [replace(whole, load=folder, save=folder, async_save=False) for folder in folders]
    for folder in folders:
        CheckpointFolder(folder).latest()  # does not refuse
    went_on_from = set()
    for folder, found in zip(folders, run_ranks(1, curves, runs, timeout_s=1200)[0], strict=True):
        went_on_from.add(found[0][0] - 1)
        assert largest_difference(found, expected[found[0][0] - 1 :]) <= 1e-10, folder
        last = sorted({1, 2, 3} if interval == 1 else {2, 3})
        saved = [name for name in names(folder) if name != TRACKER]
        assert saved == [f"iter_{step:07d}" for step in last], folder
    print(f"{len(folders)} kills, went on from {sorted(went_on_from)}")
    assert went_on_from == ({0, 2} if kind == "first" else {2} if kind == "again" else {1, 2})

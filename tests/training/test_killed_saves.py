"""A rank is killed at every operation by which a save changes the disk, one after the other.

After each kill a new start goes on from the checkpoint before or from the new one, with the losses
of a run that nobody killed, and leaves nothing but whole checkpoints.
"""

import mmap
import os
import shutil
import signal
import sys
from dataclasses import replace
from unittest import mock

import pytest

from megatron_hdp.megatron.checkpoint.checkpoints import Checkpoints
from megatron_hdp.megatron.checkpoint.folder import TRACKER, CheckpointFolder
from tests.support.gradients import write_corpus
from tests.support.ranks import RankError
from tests.training.test_checkpoint import LENGTHS, curve, largest_difference, run

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

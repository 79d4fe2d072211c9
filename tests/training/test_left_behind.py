"""Nothing is left behind: by ranks whose launcher is killed, by starts that are cut short."""

import ctypes
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import psutil
import pytest
from megatron.core.dist_checkpointing.strategies.filesystem_async import (
    FileSystemWriterAsync as Writer,
)

from megatron_hdp import pretrain_gpt
from megatron_hdp.megatron import parallel
from tests.support.processes import started, until
from tests.training.faults import planted
from tests.training.runs import folder, lines_of, long_flags

__all__ = ["folder"]  # a fixture

RANKS = 2
WITHIN_S = 120.0  # what a rank waits for would take 600 s
STAGES = ("joining", "in-a-step", "saving", "saving-asynchronously")
LONG = ("joining", "saving")


def launch(stage, argv, reached):
    """Body of a launcher: starts the ranks as torchrun does and waits for them."""
    for rank in range(RANKS):
        if os.fork() == 0:
            try:
                be_rank(rank, stage, argv, reached)
            finally:
                os._exit(1)
    os.wait()  # none ends by itself


def be_rank(rank, stage, argv, reached):
    """The training command, which stands still when it reaches the stage."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_RUN_ID": "made-up"}
    world_size = RANKS + (stage == "joining")  # one that never comes
    os.environ["WORLD_SIZE"] = str(world_size)
    join_job = parallel.join_job

    def joins(arguments):
        (reached / str(os.getpid())).touch()
        join_job(arguments)

    def writes(*args, **kwargs):
        (reached / str(os.getpid())).touch()
        time.sleep(600)

    plants = {
        "joining": lambda: mock.patch.object(parallel, "join_job", joins),
        "in-a-step": lambda: planted("1:2:stand-still", reached / "1"),
    }
    plant = plants.get(stage, lambda: mock.patch.object(Writer, "write_preloaded_data", writes))
    with plant(), mock.patch.object(sys, "argv", ["pretrain_gpt", *argv]):
        pretrain_gpt.run()


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere a rank looks by itself: test_launcher.py"
)
@pytest.mark.parametrize(
    "stage",
    [pytest.param(one, marks=pytest.mark.slow if one in LONG else ()) for one in STAGES],
)
def test_nothing_outlives_a_launcher_that_is_killed(folder, stage):
    reached = folder / "reached"
    reached.mkdir()
    writers = stage.startswith("saving")
    settings = {"save": folder / "checkpoints" if writers else None}
    settings |= {"async_save": stage.endswith("asynchronously") or None}
    argv = long_flags(folder, hdp_tokens_per_rank=50, train_iters=2, **settings)
    with started(1, folder, launch, stage, argv, reached) as (launcher,):
        wanted = 1 if stage == "in-a-step" else RANKS
        until(lambda: len(list(reached.iterdir())) >= wanted, 120, [launcher])
        tree = psutil.Process(launcher.process.pid).children(recursive=True)
        try:
            assert len(tree) > RANKS if writers else len(tree) == RANKS
            launcher.process.kill()
            _, alive = psutil.wait_procs(tree, timeout=WITHIN_S)
            assert alive == [], launcher.text()
        finally:
            for one in tree:
                if one.is_running():
                    one.kill()


STARTS = 200
LONGEST_S = 4.0
STEPS = 100_000
ENDINGS = ("kill all", "kill one", "SIGTERM")


def train(argv, temporary, shared_memory):
    """Body of a rank, in a session of its own as under torchrun, which all its helpers share."""
    os.setsid()
    if os.geteuid() == 0:
        lay_over_shared_memory(shared_memory)
    os.environ["TMPDIR"] = str(temporary)
    tempfile.tempdir = None
    pretrain_gpt.sys.argv = ["pretrain_gpt", *argv]
    pretrain_gpt.run()


def end(ranks, how):
    """Ends a job in one of the ways, as torchrun would see it; returns the exit codes."""
    first, *others = ("SIGTERM", "SIGTERM") if how == "SIGTERM" else ("SIGKILL", "SIGTERM")
    if how == "kill all":
        others = ["SIGKILL"]
    for one, name in zip(reversed(ranks), [first, *others], strict=True):
        os.kill(one.process.pid, signal.Signals[name])
    return [one.wait(60) for one in ranks]


def lay_over_shared_memory(folder):
    """Let this process and all below it see a folder in place of the machine's shared memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, bind, private = 0x20000, 4096, 16384 | (1 << 18)
    for done in (
        libc.unshare(new_mounts),
        libc.mount(None, b"/", None, ctypes.c_ulong(private), None),
        libc.mount(os.fsencode(folder), b"/dev/shm", None, ctypes.c_ulong(bind), None),
    ):
        assert done == 0, os.strerror(ctypes.get_errno())


def left_of(sessions):
    """Processes that live of sessions with these ends; a later one was given a number again."""
    found = []
    for process in psutil.process_iter(["pid", "status", "create_time"]):
        try:
            ended = sessions.get(os.getsid(process.pid), 0.0)
        except ProcessLookupError:
            continue
        if process.info["create_time"] < ended and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.pid)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("is_async", [False, True], ids=["saving", "saving-asynchronously"])
def test_restarts_leave_nothing_behind(folder, is_async):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    temporary, save, shared_memory = folder / "tmp", folder / "checkpoints", folder / "shm"
    temporary.mkdir()
    shared_memory.mkdir()
    settings = {"hdp_tokens_per_rank": 50, "train_iters": STEPS, "save": save, "load": save}
    settings |= {"save_interval": 1, "metrics_path": folder / "metrics.jsonl"}
    argv = long_flags(folder, **settings, async_save=is_async or None)
    sessions, reached = {}, 0
    for number in range(STARTS // 2):
        how = draw.choice(ENDINGS)
        (folder / "logs" / str(number)).mkdir(parents=True)
        places = (temporary, shared_memory)
        with started(RANKS, folder / "logs" / str(number), train, argv, *places) as ranks:
            time.sleep(draw.random() * LONGEST_S)
            codes = end(ranks, how)
            sessions |= {one.process.pid: time.time() for one in ranks}
        texts = [one.text() for one in ranks]
        assert all(code in (0, 3, -signal.SIGKILL, -signal.SIGTERM) for code in codes), texts
        latest = latest_in(save)
        assert latest >= reached, f"start {number} ({how}) went back: {texts}"
        reached = latest
    assert reached > 0
    until(lambda: not left_of(sessions), 30)
    assert os.listdir(temporary) == []
    assert os.listdir(shared_memory) == []  # of root alone, as others cannot lay it over
    steps = [one["step"] for one in lines_of(folder / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= reached - 1
    partial = [name for name in os.listdir(save) if "partial" in name]
    assert len(partial) <= 1, "only the last start's may be there"


def latest_in(save: Path) -> int:
    """The iteration that a folder of checkpoints names; it must be there."""
    tracker = save / "latest_checkpointed_iteration.txt"
    if not tracker.exists():
        return 0
    iteration = int(tracker.read_text())
    assert (save / f"iter_{iteration:07d}" / "metadata.json").exists()
    return iteration

"""Ranks whose launcher is killed end within seconds, whatever they do, and so do their writers."""

import os
import sys
import time
from unittest import mock

import psutil
import pytest
from megatron.core.dist_checkpointing.strategies.filesystem_async import (
    FileSystemWriterAsync as Writer,
)

from megatron_hdp import pretrain_gpt
from megatron_hdp.megatron import parallel
from tests.support.processes import started
from tests.training.faults import planted
from tests.training.test_survival import flags, folder  # noqa: F401

RANKS = 2
WITHIN_S = 120.0  # what a rank waits for would take 600 s
STAGES = {
    "joining": {},
    "in-a-step": {},
    "saving": {"save": "checkpoints"},
    "saving-asynchronously": {"save": "checkpoints", "async-save": ""},
}

LONG = ("joining", "saving")

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere a rank looks by itself: test_launcher.py"
)


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


@pytest.mark.parametrize(
    "stage",
    [pytest.param(one, marks=pytest.mark.slow if one in LONG else ()) for one in STAGES],
)
def test_nothing_outlives_a_launcher_that_is_killed(folder, stage):  # noqa: F811
    reached = folder / "reached"
    reached.mkdir()
    argv = flags(folder, hdp_tokens_per_rank=50, train_iters=2)
    for name, value in STAGES[stage].items():
        argv += [f"--{name}", *([str(folder / value)] if value else [])]
    with started(1, folder, launch, stage, argv, reached) as (launcher,):
        wanted = 1 if stage == "in-a-step" else RANKS
        deadline = time.monotonic() + 120
        while len(list(reached.iterdir())) < wanted:
            assert launcher.process.is_alive() and time.monotonic() < deadline, launcher.text()
            time.sleep(0.02)
        tree = psutil.Process(launcher.process.pid).children(recursive=True)
        writers = stage.startswith("saving")
        try:
            assert len(tree) > RANKS if writers else len(tree) == RANKS
            launcher.process.kill()
            _, alive = psutil.wait_procs(tree, timeout=WITHIN_S)
            assert alive == [], launcher.text()
        finally:
            for one in tree:
                if one.is_running():
                    one.kill()

"""Two hundred starts, most of them cut short at a random moment, leave nothing behind."""

import json
import os
import random
import signal
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from megatron_hdp import pretrain_gpt
from megatron_hdp.data_plane.names import PREFIX
from tests.support.processes import started
from tests.training.test_survival import flags, folder  # noqa: F401

STARTS = 200
RANKS = 2
LONGEST_S = 4.0
STEPS = 100_000
ENDINGS = ("kill all", "kill one", "SIGTERM")


def train(argv, temporary):
    """Body of a rank, in a session of its own as under torchrun, which all its helpers share."""
    os.setsid()
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


def left_of(sessions):
    """Processes of these sessions that live."""
    found = []
    for process in psutil.process_iter(["pid", "status"]):
        try:
            is_ours = os.getsid(process.pid) in sessions
        except ProcessLookupError:
            continue
        if is_ours and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.pid)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("is_async", [False, True], ids=["saving", "saving-asynchronously"])
def test_restarts_leave_nothing_behind(folder, is_async):  # noqa: F811
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    temporary, save = folder / "tmp", folder / "checkpoints"
    temporary.mkdir()
    shared_memory = in_shared_memory()
    argv = (
        flags(
            folder,
            hdp_tokens_per_rank=50,
            train_iters=STEPS,
            save=save,
            load=save,
            save_interval=1,
            metrics_path=folder / "metrics.jsonl",
        )
        + ["--async-save"] * is_async
    )
    sessions, reached = set(), 0
    for number in range(STARTS // 2):
        how = draw.choice(ENDINGS)
        (folder / "logs" / str(number)).mkdir(parents=True)
        with started(RANKS, folder / "logs" / str(number), train, argv, temporary) as ranks:
            sessions |= {one.process.pid for one in ranks}
            time.sleep(draw.random() * LONGEST_S)
            codes = end(ranks, how)
        texts = [one.text() for one in ranks]
        assert all(code in (0, 3, -signal.SIGKILL, -signal.SIGTERM) for code in codes), texts
        latest = latest_in(save)
        assert latest >= reached, f"start {number} ({how}) went back: {texts}"
        reached = latest
    assert reached > 0
    deadline = time.monotonic() + 30
    while left := left_of(sessions):
        assert time.monotonic() < deadline, f"processes {left} are left over"
        time.sleep(0.2)
    assert os.listdir(temporary) == []
    assert in_shared_memory() <= shared_memory
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").open()]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= reached - 1
    partial = [name for name in os.listdir(save) if "partial" in name]
    assert len(partial) <= 1, "only the last start's may be there"


def in_shared_memory() -> set[str]:
    """What lies there, but for data planes: these runs have none, other processes may."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(PREFIX)}


def latest_in(save: Path) -> int:
    """The iteration that a folder of checkpoints names; it must be there."""
    tracker = save / "latest_checkpointed_iteration.txt"
    if not tracker.exists():
        return 0
    iteration = int(tracker.read_text())
    assert (save / f"iter_{iteration:07d}" / "metadata.json").exists()
    return iteration

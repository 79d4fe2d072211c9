"""Ranks are killed with SIGKILL while they train and save; what is left continues all the same.

Each launch is killed at a moment drawn at random, most of them while a checkpoint is being written;
the moments' seed is printed. In the end every step must stand in metrics.jsonl once, with the loss
and the data position of a run that nobody killed.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields, replace
from unittest import mock

import psutil
import pytest
import torch.distributed as dist

from megatron_hdp.megatron.checkpoint.folder import TRACKER, CheckpointFolder
from megatron_hdp.megatron.checkpoint.run_folder import RunFolder
from megatron_hdp.options import flag_of
from megatron_hdp.training.loop import pretrain
from tests.support.gradients import write_corpus
from tests.support.ranks import RankError
from tests.training.test_checkpoint import LENGTHS, run

NUM_RANKS = 2
DEADLINE_S = 300.0
MAX_STEPS = 3  # a launch is killed within so many steps of its first one


def train(arguments, folder, writing_in_place):
    """Body of a rank that can be killed."""
    (folder / f"rank-{os.environ['RANK']}").write_text(str(os.getpid()))
    with ExitStack() as planted:
        if writing_in_place:
            planted.enter_context(mock.patch.object(CheckpointFolder, "begin", begin_in_place))
            planted.enter_context(mock.patch.object(CheckpointFolder, "publish", _nothing))
            planted.enter_context(mock.patch.object(RunFolder, "_require_free", _nothing))
        pretrain(arguments)


def begin_in_place(self, iteration):
    """The planted fault: the checkpoint is the latest before it is written."""
    place = self.path / f"iter_{iteration:07d}"
    place.mkdir(parents=True)
    (self.path / TRACKER).write_text(str(iteration))
    time.sleep(0.5)
    return place


def _nothing(*_):
    return None


class ForkedLaunch:
    """A run on ranks of the test suite's server; quick to start."""

    def __init__(
        self, run_ranks, arguments, folder, *, num_ranks=NUM_RANKS, writing_in_place=False
    ):
        self.folder = folder / f"launch-{time.monotonic_ns()}"
        self.folder.mkdir()
        self.error = None
        call = (run_ranks, num_ranks, arguments, writing_in_place)
        self.thread = threading.Thread(target=self._run, args=call, daemon=True)
        self.thread.start()

    def _run(self, run_ranks, num_ranks, arguments, writing_in_place):
        try:
            run_ranks(num_ranks, train, arguments, self.folder, writing_in_place)
        except RankError as error:
            self.error = error

    def pids(self):
        texts = [path.read_text() for path in self.folder.iterdir()]
        return [int(text) for text in texts if text]

    def has_ended(self):
        return not self.thread.is_alive()

    def wait(self):
        self.thread.join(DEADLINE_S)
        assert self.has_ended(), "the ranks do not end"

    def require_success(self):
        self.wait()
        if self.error is not None:
            raise self.error


class CommandLaunch:
    """The training command, a process a rank, as torchrun starts it."""

    def __init__(self, arguments, folder):
        self.store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.log = folder / f"launch-{time.monotonic_ns()}.log"
        self.processes = []
        for rank in range(NUM_RANKS):
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(NUM_RANKS),
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": str(self.store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "OMP_NUM_THREADS": "1",
            }
            command = [sys.executable, "-W", "ignore", "-m", "megatron_hdp.pretrain_gpt"]
            with self.log.open("ab") as log:
                self.processes.append(
                    subprocess.Popen(
                        command + command_line(arguments), env=environment, stdout=log, stderr=log
                    )
                )

    def pids(self):
        return [process.pid for process in self.processes]

    def has_ended(self):
        return all(process.poll() is not None for process in self.processes)

    def wait(self):
        for process in self.processes:
            process.wait(DEADLINE_S)

    def require_success(self):
        self.wait()
        assert all(process.returncode == 0 for process in self.processes), self.log.read_text()


def command_line(arguments):
    """The flags of a run."""
    line = []
    for item in fields(arguments):
        value = getattr(arguments, item.name)
        if value is None or value == item.default:
            continue
        if isinstance(value, bool):
            line.append(flag_of(item.name) if value else item.metadata["off_flag"])
        else:
            values = value if isinstance(value, tuple) else (value,)
            line += [flag_of(item.name), *map(str, values)]
    return line


def steps_in(path):
    """The lines of a metrics file, the last one left out while it is being written."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def wait_until(condition, launch, what):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if launch.has_ended():
            launch.require_success()
            raise AssertionError(f"the run ended before {what}")
        assert time.monotonic() < deadline, f"no {what} in {DEADLINE_S} s"
        time.sleep(0.001)


def kill_at_a_random_moment(launch, arguments, draw):
    """Waits for the moment, kills every rank, returns the helpers that outlive them."""
    first = len(steps_in(arguments.metrics_path)) + 1
    target = first + draw.randrange(MAX_STEPS)
    if draw.random() < 0.7:
        pattern = f"iter_{target:07d}.partial-*"
        wait_until(lambda: [*arguments.save.glob(pattern)], launch, f"a save of step {target}")
        time.sleep(draw.uniform(0.0, 0.6))
    else:
        wait_until(
            lambda: len(steps_in(arguments.metrics_path)) >= target, launch, f"step {target}"
        )
        time.sleep(draw.uniform(0.0, 0.3))
    pids = launch.pids()
    assert len(pids) == NUM_RANKS
    helpers = [child for pid in pids for child in psutil.Process(pid).children(recursive=True)]
    for pid in draw.sample(pids, len(pids)):
        os.kill(pid, signal.SIGKILL)
        time.sleep(draw.choice([0.0, 0.05]))
    launch.wait()
    return helpers


@contextmanager
def reaped(helpers):
    """Kills in the end the writers that outlived their rank."""
    try:
        yield
    finally:
        for helper in helpers:
            with suppress(psutil.NoSuchProcess):
                helper.kill()


def survive(start, arguments, num_kills, seed):
    """Runs to the end through `num_kills` kills, each launch continuing what the last one left.

    Every second launch saves asynchronously.
    """
    print(f"moments drawn with seed {seed}")
    draw = random.Random(seed)
    helpers = []
    with reaped(helpers):
        for kill in range(num_kills):
            launch = start(replace(arguments, async_save=kill % 2 == 0))
            helpers += kill_at_a_random_moment(launch, arguments, draw)
        start(arguments).require_success()


def check_against(expected, arguments):
    """Every step is there once and is the step of the run that nobody killed."""
    found = steps_in(arguments.metrics_path)
    assert [record["step"] for record in found] == list(range(1, arguments.train_iters + 1))
    for record, reference in zip(found, expected, strict=True):
        for key in ("consumed_sequences", "consumed_tokens"):
            assert record[key] == reference[key]
        assert record["loss"] == pytest.approx(reference["loss"], rel=1e-10)


def killable(tmp_path, num_kills, **overrides):
    """A run that saves and reports every step and is long enough for the kills."""
    return run(
        write_corpus(tmp_path, LENGTHS),
        train_iters=MAX_STEPS * num_kills + 2,
        lr_decay_iters=100,
        save=tmp_path / "checkpoints",
        load=tmp_path / "checkpoints",
        save_interval=1,
        metrics_path=tmp_path / "metrics.jsonl",
        distributed_timeout_minutes=4,
        **overrides,
    )


def uninterrupted(run_ranks, arguments, tmp_path):
    metrics = tmp_path / "uninterrupted.jsonl"
    alone = replace(arguments, save=None, load=None, save_interval=None, metrics_path=metrics)
    run_ranks(NUM_RANKS, pretrain_quietly, alone)
    return steps_in(metrics)


def pretrain_quietly(arguments):
    pretrain(arguments)


def test_kills_of_forked_ranks(run_ranks, tmp_path):
    num_kills = 2
    arguments = killable(tmp_path, num_kills)
    expected = uninterrupted(run_ranks, arguments, tmp_path)
    survive(
        lambda arguments: ForkedLaunch(run_ranks, arguments, tmp_path),
        arguments,
        num_kills,
        seed=random.randrange(10**6),
    )
    check_against(expected, arguments)


def test_writing_in_place_does_not_survive(run_ranks, tmp_path):
    arguments = killable(tmp_path, 2)
    launch = ForkedLaunch(run_ranks, arguments, tmp_path, writing_in_place=True)
    tracker = arguments.save / TRACKER
    is_saving = lambda: tracker.exists() and tracker.read_text() == "2"  # noqa: E731
    wait_until(is_saving, launch, "a save of step 2")
    for pid in launch.pids():
        os.kill(pid, signal.SIGKILL)
    launch.wait()
    with pytest.raises(RankError):
        ForkedLaunch(run_ranks, arguments, tmp_path).require_success()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_kills_of_the_training_command(run_ranks, tmp_path):
    num_kills = 24
    sharded = {"use_distributed_optimizer": True, "overlap_grad_reduce": True}
    arguments = killable(tmp_path, num_kills, **sharded)
    expected = uninterrupted(run_ranks, arguments, tmp_path)
    survive(
        lambda arguments: CommandLaunch(arguments, tmp_path),
        arguments,
        num_kills,
        seed=random.randrange(10**6),
    )
    check_against(expected, arguments)

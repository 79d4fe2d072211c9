"""A run loses a rank a hundred times, in each phase of its steps, and its steps stay the same.

Each process notes in memory that all share in which phase it is. A rank and a phase are drawn, and
some moment of that phase: the rank gets SIGKILL. What it was doing is read behind its death, for a
busy machine may be late. Their seed is printed.
"""

import contextlib
import functools
import importlib
import os
import random
import signal
import time
from collections import Counter

import numpy as np
import pytest
import torch.distributed as dist

from megatron_hdp.training import survival
from tests.support.epochs import SurvivingJob
from tests.training.test_lost_rank import (
    SHARDED,
    reference,
    require_same_steps,
    require_survived,
    surviving,
)

RANKS, MOST_MEMBERS, MOST_BEGUN = 4, 1024, 16384
LOOP, MEGATRON = "megatron_hdp.training.loop", "megatron.core"
SURVIVAL, RECOVERY = survival.__name__, "megatron_hdp.megatron.world.recovery"
PHASES = {  # what runs; some within others
    "gradients": [(SURVIVAL, "gradients_of_step")],
    "reduction": [(f"{MEGATRON}.distributed", "DistributedDataParallel.finish_grad_sync")],
    "vote": [(SURVIVAL, "require_finite")],
    "optimizer": [(SURVIVAL, "apply_step")],
    "gather": [(f"{MEGATRON}.distributed", "DistributedDataParallel.start_param_sync")],
    "metrics": [(SURVIVAL, "write_step")],
    "evaluation": [(LOOP, "validate")],
    "agreement": [(SURVIVAL, "_Run._agreed")],
    "saving": [(SURVIVAL, "save_if_due")],
    "recovery": [
        *((RECOVERY, "Recovery._leave"), (RECOVERY, "Recovery.enter")),
        (SURVIVAL, "_Run._make_job"),
    ],
}
NAMES = ["between", *PHASES]
DAWDLES_S = 0.005
"""At both ends of a phase, so that none is too short to be hit."""


class Notes:
    """What processes of a job note for the one that kills them, in a file that all have mapped."""

    def __init__(self, path):
        self._path = path
        self.phase = np.memmap(path, np.uint8, "r+", 0, (MOST_MEMBERS,))
        self.count = np.memmap(path, np.int64, "r+", MOST_MEMBERS, (1,))
        self.begun = np.memmap(path, np.int64, "r+", MOST_MEMBERS + 8, (MOST_BEGUN, 2))

    def get(self, member):
        """The fault of each member, as `SurvivingJob` asks for it."""
        return functools.partial(notes_its_calls, self._path)

    def take_part(self, member):
        """In the member's process: its calls are noted from now on."""
        for name, functions in PHASES.items():
            for module, function in functions:
                self._note_calls(member, NAMES.index(name), module, function)
        take_part, run_step = survival._Run.take_part, survival._Run._run_step

        def in_epoch(run, epoch):
            self.epoch = epoch.number
            return take_part(run, epoch)

        def begun(run, *args):
            if dist.get_rank() == 0:
                self.begun[self.count[0]] = self.epoch, run._progress.iteration + 1
                self.count[0] += 1
            return run_step(run, *args)

        survival._Run.take_part, survival._Run._run_step = in_epoch, begun

    def _note_calls(self, member, number, module, function):
        owner, (*classes, name) = importlib.import_module(module), function.split(".")
        for one in classes:
            owner = getattr(owner, one)
        original = getattr(owner, name)

        @functools.wraps(original)
        def called(*args, **kwargs):
            before, self.phase[member] = self.phase[member], number
            time.sleep(DAWDLES_S)
            try:
                return original(*args, **kwargs)
            finally:
                time.sleep(DAWDLES_S)
                self.phase[member] = before

        setattr(owner, name, called)

    def redone(self):
        """By epoch behind the first: how many steps it ran again."""
        begun = self.begun[: self.count[0]]
        ends = np.flatnonzero(np.diff(begun[:, 0]))
        return {int(begun[at + 1, 0]): int(begun[at, 1] - begun[at + 1, 1] + 1) for at in ends}


def notes_its_calls(path, member):
    """The fault of a member."""
    Notes(path).take_part(member)


class Campaign:
    """Kills ranks of a job, one after another, each once all are there."""

    def __init__(self, notes, num_kills, draw, most_delay_s=0.05):
        self.notes, self.killed, self.waits_s = notes, [], []
        self._num_kills, self._draw, self._most_delay_s = num_kills, draw, most_delay_s
        wanted = [name for name in PHASES for _ in range(-(-num_kills // len(PHASES)))]
        draw.shuffle(wanted)
        self._wanted = wanted[:num_kills]
        self._epoch, self._step, self._killed_at = 0, 0, None

    def _is_hasty(self):
        """Whether the next one is to die on the way into an epoch, maybe before it runs a step."""
        return len(self.killed) < len(self._wanted) and self._wanted[len(self.killed)] == "recovery"

    def disturb(self, job):
        """Called again and again by the job."""
        epoch, step = job.coordinator.epoch, job.last_step()
        if self._killed_at is not None and step > self._step:
            self.waits_s.append(time.monotonic() - self._killed_at)
            self._killed_at = None
        if len(epoch.members) < RANKS or (self._killed_at is not None and not self._is_hasty()):
            return
        if len(self.killed) == self._num_kills:
            if epoch.number > self._epoch:  # the last one was replaced
                job.terminate()
                self._num_kills = -1
            return
        if len(self.killed) > self._num_kills or epoch.number == self._epoch > 0:
            return
        wanted = self._wanted[len(self.killed)]
        number = NAMES.index(wanted)
        slot = self._draw.randrange(RANKS)
        victim = epoch.members[slot]
        if wanted != "recovery":  # the way into the epoch that has just been named
            time.sleep(self._draw.uniform(0.0, 0.5))
        deadline = time.monotonic() + (0.5 if wanted == "recovery" else 2.0)
        while self.notes.phase[victim] != number and time.monotonic() < deadline:
            time.sleep(0.0)
        time.sleep(self._draw.choice([0.0, self._draw.uniform(0.0, self._most_delay_s)]))
        if job.coordinator.epoch is not epoch or not job.processes[victim].is_alive():
            return
        self._step, self._epoch = job.last_step(), epoch.number
        self._killed_at = time.monotonic()
        job.kill(victim)
        job.processes[victim].join()
        self.killed.append((NAMES[self.notes.phase[victim]], slot, victim))


class LongJob(SurvivingJob):
    """One that is told to end."""

    def last_step(self):
        """Whole lines of its metrics."""
        path = self.arguments.metrics_path
        if not path.exists():
            return 0
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 65536))
            text = file.read().rpartition(b"\n")[0]
        at = text.rfind(b'"step":')
        return int(text[at + 7 :].split(b",")[0]) if at >= 0 else 0

    def terminate(self):
        """As Slurm ends a job: with a signal."""
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)


HOW = {
    "whole": {},
    "sharded": SHARDED,
    "gathered-beside": SHARDED | {"overlap_param_gather": True, "async_save": True},
}


@pytest.mark.slow
@pytest.mark.skipif("HDP_TEST_KILLS" not in os.environ, reason="asked for by HDP_TEST_KILLS=100")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("how", HOW)
def test_a_hundred_kills(run_ranks, tmp_path, how):
    num_kills = int(os.environ["HDP_TEST_KILLS"])
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    (tmp_path / "notes").write_bytes(bytes(MOST_MEMBERS + 8 + 16 * MOST_BEGUN))
    campaign = Campaign(Notes(tmp_path / "notes"), num_kills, random.Random(seed))
    settings = {"train_iters": 10_000, "lr_decay_iters": 10_000, "lr": 1e-4, **HOW[how]}
    settings |= {"eval_iters": 1, "eval_interval": 3, "split": "4,4,0", "global_batch_size": 4}
    saved = {"save": tmp_path / "saved", "save_interval": 2}
    job = LongJob(surviving(tmp_path, **settings, **saved), RANKS, tmp_path, campaign.notes, True)
    require_survived(job, job.run(campaign.disturb, timeout_s=3000))
    assert len(campaign.killed) == num_kills
    steps = len(job.steps())
    redone = Counter(campaign.notes.redone().values())
    waits_s = np.sort(campaign.waits_s)
    print(f"{how}: {num_kills} kills in {steps} steps")
    print("phases", dict(Counter(name for name, *_ in campaign.killed)))
    print("places", dict(Counter(slot for _, slot, _ in campaign.killed)))
    print("steps run again, by how many", dict(redone))
    print("seconds until a step had ended", np.quantile(waits_s, [0, 0.5, 0.9, 0.99, 1]).round(3))
    expected = reference(run_ranks, tmp_path, **settings | {"train_iters": steps})
    require_same_steps(job, expected, within=1e-9)
    spread = "use_distributed_optimizer" in settings
    assert max(redone) <= 1 + spread
    hit = {name for name, *_ in campaign.killed}
    assert hit >= PHASES.keys() - ({"gather"} if not spread else set()), hit
    assert {slot for _, slot, _ in campaign.killed} == set(range(RANKS))

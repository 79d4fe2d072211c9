"""A job whose ranks die and join, with the coordinator that `megatron-hdp launch` runs by.

Processes are forked as `tests.support.ranks` forks them, which spares each of them its imports.
"""

import errno
import faulthandler
import functools
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from unittest import mock

import psutil
import torch.distributed as dist

from megatron_hdp.exit_codes import ExitCode
from megatron_hdp.launching.agent import FINAL
from megatron_hdp.launching.coordinator import Coordinator
from megatron_hdp.launching.node_ranks import Ended
from megatron_hdp.launching.plan import KNOW_S
from megatron_hdp.runtime.epochs import Membership, NotNamedError, keys
from tests.support import ranks


@dataclass
class SurvivingJob:
    """Runs training on processes that may be killed.

    Args:
        arguments: of the run.
        num_ranks: at the start.
        folder: of what processes print.
        faults: by member, what is called in its process before it trains, with one argument.
        replaces: whether others join in the place of lost ones.
        spares: HDP ranks that wait for a place from the start.
        hosts: by member, names of hosts; default: this one's.
        may_fail: whether a rank may end by an exception; else that is an error of the test.
    """

    arguments: object
    num_ranks: int
    folder: Path
    faults: dict = field(default_factory=dict)
    replaces: bool = False
    hosts: Sequence[str] = ()
    spares: int = 0
    may_fail: bool = False
    said: list = field(default_factory=list)
    died: list = field(default_factory=list)

    def run(self, disturb=lambda job: None, timeout_s=240.0):
        """The exit codes of the last members; `disturb` is called again and again."""
        self.store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        self.coordinator = Coordinator(self.store, range(self.num_ranks), self.said.append)
        self.processes, self.codes = {}, {}
        deadline = time.monotonic() + timeout_s
        try:
            with ranks._server_environment():
                for member in range(self.num_ranks):
                    self.start(member, ())
                self._watch(disturb, deadline)
        finally:
            for process in self.processes.values():
                process.kill()
                process.join()
        return [self.codes.get(one) for one in self.coordinator.epoch.members]

    def _watch(self, disturb, deadline):
        coordinator = self.coordinator
        while self.processes and not coordinator.is_done():  # who would join then, need not
            if time.monotonic() > deadline:
                raise AssertionError("\n".join([*self.said, self._stacks()]))
            survives = coordinator.begin()
            for member, process in list(self.processes.items()):
                if process.exitcode is None:
                    continue
                del self.processes[member]
                self.codes[member] = process.exitcode
                ended = Ended(member, process.exitcode)
                if ended.code and coordinator.is_member(member):
                    self.died.append(ended)
                    if ended.code == ExitCode.FAILED and not self.may_fail:
                        raise AssertionError("\n".join([ended.words(), *self.said, self._stacks()]))
                    if ended.code in FINAL:
                        self._wait_for_the_others(ended.words(), deadline)
                        return
                for mate in coordinator.note(ended):
                    self.processes[mate].kill()
            if survives:
                coordinator.look()
                for member in coordinator.late():
                    self.kill(member)
                self._replace()
                disturb(self)
            time.sleep(0.005)

    def _wait_for_the_others(self, why, deadline):
        """A rank has ended as one does that knows that the job cannot continue."""
        members, is_dismissed_at = self.coordinator.epoch.members, time.monotonic() + KNOW_S
        while any(one in self.processes for one in members) and time.monotonic() < deadline:
            for member, process in list(self.processes.items()):
                if process.exitcode is not None:
                    self.codes[member] = process.exitcode
                    del self.processes[member]
            if time.monotonic() > is_dismissed_at:
                self.coordinator.dismiss(why)
                is_dismissed_at = deadline
            time.sleep(0.01)

    def _replace(self):
        replica = self.coordinator.terms.replica
        if not (self.replaces or self.spares) or self.coordinator._done:
            return
        retired = len(self.coordinator.retired) // replica
        while self.coordinator.num_coming < self.num_ranks // replica + self.spares - retired:
            first = max([*self.codes, *self.processes]) + 1
            members = tuple(range(first, first + replica))
            self.coordinator.joins(members)
            for one in members:
                self.start(one, members)

    def start(self, member, joins):
        address = "127.0.0.1", self.store.port
        environment = {keys.MEMBER: str(member), keys.JOINS: json.dumps(joins)}
        environment["WORLD_SIZE"] = str(self.num_ranks)
        if member < self.num_ranks:
            environment[keys.PLACE] = str(member)
        if member < len(self.hosts):
            environment[keys.HOST] = self.hosts[member]
        fault = self.faults.get(member)
        process = ranks._context.Process(
            target=_member, args=(address, environment, self.arguments, self.folder, fault)
        )
        process.start()
        self.processes[member] = process

    def kill(self, member):
        """Kills a process, unless it has just ended."""
        self.processes[member].kill()

    def _stacks(self):
        """What all threads of all processes do, at the end of what these have printed."""
        for process in self.processes.values():
            os.kill(process.pid, signal.SIGUSR2)
        time.sleep(1.0)
        return "".join(f"--- {name}\n{text[-6000:]}" for name, text in self.printed().items())

    def steps(self):
        """Lines of metrics so far, without one that is being written."""
        path = self.arguments.metrics_path
        lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def printed(self):
        """What all processes have printed, by member."""
        return {path.name: path.read_text() for path in sorted(self.folder.glob("member-*"))}


def _member(address, environment, arguments, folder, fault):
    from megatron_hdp.pretrain_gpt import code_of
    from megatron_hdp.runtime.health import RankFailure
    from megatron_hdp.training import survival

    member = int(environment[keys.MEMBER])
    output = os.open(folder / f"member-{member}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
    with mock.patch.dict(os.environ, environment):
        membership = Membership(address, member, 60.0)
        if fault is not None:
            fault(member)
        try:
            survival.pretrain(arguments, membership)
            code = 0
        except (RankFailure, NotNamedError, ValueError, OSError) as error:
            traceback.print_exc()
            code = code_of(error, survives=True)
        except BaseException:
            traceback.print_exc()
            code = ExitCode.FAILED
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@dataclass
class Deaths:
    """Kills ranks of a job, one after another, and notes what its first one holds meanwhile.

    Args:
        num_done: how many steps have ended.
        num_ranks: of the job; none is killed before all are there.
        undisturbed: steps before the first death.
        settled: deaths behind which what is held should not grow any more.
        deaths: as many.
    """

    num_done: Callable[[], int]
    num_ranks: int = 3
    undisturbed: int = 60
    settled: int = 6
    deaths: int = 20
    killed: list = field(default_factory=list)
    held: dict = field(default_factory=dict)
    _in_epoch: int = -1

    def disturb(self, job):
        """Called again and again by the job."""
        epoch, done, killed = job.coordinator.epoch, self.num_done(), len(self.killed)
        members = epoch.members
        if done >= self.undisturbed // 2 and "begun" not in self.held:
            self.held["begun"] = done, *_held_by(job.processes[0].pid)
        if len(members) < self.num_ranks or done < self.undisturbed + 6 * killed:
            return
        if killed in (0, self.settled, self.deaths) and str(killed) not in self.held:
            self.held[str(killed)] = done, *_held_by(job.processes[0].pid)
        victim = members[1 + killed % (self.num_ranks - 1)]
        if victim in job.processes and killed < self.deaths and epoch.number > self._in_epoch:
            self._in_epoch = epoch.number  # whose end is not seen at once
            self.killed.append(victim)
            job.kill(victim)

    def grown(self):
        """Bytes and descriptors between two deaths, without what steps alone let bytes grow by."""
        counts = "begun", "0", str(self.settled), str(self.deaths)
        begun, quiet, first, last = (self.held[one] for one in counts)
        of_step = (quiet[1] - begun[1]) / (quiet[0] - begun[0])
        return last[1] - first[1] - of_step * (last[0] - first[0]), last[2] - first[2]


def _held_by(process):
    """Bytes and descriptors."""
    found = psutil.Process(process)
    return found.memory_info().rss, found.num_fds()


@dataclass(frozen=True)
class DiesIn:
    """A fault: the process kills itself when it calls a function of a step."""

    function: str
    """Of the module, or of a class of it."""
    step: int
    """That runs, or has just been applied."""
    behind: bool = False
    """Behind the call, not before."""
    module: str = "megatron_hdp.training.survival"

    def happen(self):
        """Ends the process."""
        os.kill(os.getpid(), signal.SIGKILL)

    def __call__(self, member):
        owner, (*classes, name) = importlib.import_module(self.module), self.function.split(".")
        for one in classes:
            owner = getattr(owner, one)
        original, calls = getattr(owner, name), []

        @functools.wraps(original)
        def called(*args, **kwargs):
            calls.append(None)
            is_it = len(calls) == self.step
            if is_it and not self.behind:
                self.happen()
            result = original(*args, **kwargs)
            if is_it:
                self.happen()
            return result

        setattr(owner, name, called)


class IsCutOffIn(DiesIn):
    """Communication fails there instead, as where another rank has died."""

    def happen(self):
        """Raises."""
        raise RuntimeError("a planted failure of communication")


def has_no_room(step, member=None):
    """A fault: the disk has none for the process's part of the checkpoint of a step."""
    original = os.fsync

    def fsync(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if path.endswith(".distcp") and f"iter_{step:07d}" in path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(descriptor)

    os.fsync = fsync

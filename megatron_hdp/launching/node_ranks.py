"""The processes of one node: started with what torchrun would tell them, watched, ended."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron_hdp.processes import end_with_parent

_STOPPED = ("T", "t")
_LOOK_AGAIN_S = 0.5  # reading the state of processes is most of what an agent does


@dataclass(frozen=True)
class Ended:
    """A process that has ended."""

    member: int
    code: int
    """Its exit code; of one that a signal killed, minus its number."""
    why: str = ""
    """If it did not end for itself."""

    def words(self) -> str:
        """``member 3 was killed by SIGKILL``."""
        if self.why:
            return self.why
        if self.code < 0:
            return f"member {self.member} was killed by {signal.Signals(-self.code).name}"
        return f"member {self.member} ended with exit code {self.code}"


class NodeRanks:
    """The processes of this node, each in a slot: its ``LOCAL_RANK``, which names its GPU.

    Args:
        command: what each runs.
        num_slots: processes at a time.
        environment: of all of them, beside this process's own.
    """

    def __init__(
        self, command: Sequence[str], num_slots: int, environment: Mapping[str, str]
    ) -> None:
        self._command = list(command)
        self._environment = {**os.environ, **environment, "LOCAL_WORLD_SIZE": str(num_slots)}
        self._num_slots = num_slots
        self._running: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}
        self._stopped_since: dict[int, float] = {}
        self._looked_at = float("-inf")
        self._retired: set[int] = set()

    def __len__(self) -> int:
        return len(self._running)

    @property
    def members(self) -> list[int]:
        """Those that run."""
        return list(self._running)

    def free_slots(self) -> list[int]:
        """Slots without a process, in which others may start."""
        taken = {slot for slot, _ in self._running.values()} | self._retired
        return [slot for slot in range(self._num_slots) if slot not in taken]

    def retire(self, member: int) -> None:
        """Nothing starts any more in the slot of a process, which is slow."""
        if member in self._running:
            self._retired.add(self._running[member][0])

    def start(self, member: int, slot: int, environment: Mapping[str, str]) -> None:
        """Starts a process in a free slot."""
        own = {**self._environment, **environment, "LOCAL_RANK": str(slot)}
        bond = partial(end_with_parent, os.getpid())  # the kernel ends it with this process
        self._running[member] = slot, subprocess.Popen(self._command, env=own, preexec_fn=bond)

    def ended(self) -> list[Ended]:
        """Those that have ended since the latest call."""
        found = []
        for member, (_, process) in list(self._running.items()):
            code = process.poll()
            if code is not None:
                del self._running[member]
                self._stopped_since.pop(member, None)
                found.append(Ended(member, code))
        return found

    def give_up_stopped(self, patience_s: float) -> list[int]:
        """Kills those that have been stopped (SIGSTOP) for longer; returns which.

        Looks twice a second, however often it is called.
        """
        now, found = time.monotonic(), []
        if now - self._looked_at < _LOOK_AGAIN_S:
            return []
        self._looked_at = now
        for member, (_, process) in self._running.items():
            if not _is_stopped(process.pid):
                self._stopped_since.pop(member, None)
            elif now - self._stopped_since.setdefault(member, now) > patience_s:
                found.append(member)
        for member in found:
            self.kill(member)
        return found

    def kill(self, member: int) -> None:
        """Kills one, in the middle of anything; it can write nothing more."""
        if member in self._running:
            self._running[member][1].kill()

    def send(self, number: int) -> None:
        """Sends a signal to all."""
        for _, process in self._running.values():
            with suppress(ProcessLookupError):
                process.send_signal(number)

    def kill_all(self, timeout_s: float) -> None:
        """Kills all, from any thread, and waits a while until they have ended."""
        deadline = time.monotonic() + timeout_s
        processes = [process for _, process in list(self._running.values())]
        for process in processes:
            process.kill()
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.01))

    def end(self, grace_s: float) -> None:
        """Ends all: asks, and after a while kills."""
        self.send(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while self._running and time.monotonic() < deadline:
            self.ended()
            time.sleep(0.02)
        for member in list(self._running):
            self.kill(member)
        for _, process in self._running.values():
            process.wait()
        self._running.clear()


def _is_stopped(process: int) -> bool:
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] in _STOPPED

"""A command as a process of its own, with all that it starts: waited for, or its stacks told."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
_STACKS_S = 10.0


@dataclass
class Command:
    """One that runs, or has ended; what it writes goes to a file."""

    process: "subprocess.Popen[bytes]"
    output: Path

    def text(self) -> str:
        """What it has written, standard output and error."""
        return self.output.read_text(errors="replace")

    def wait(self, timeout_s: float) -> int:
        """Return its exit code; fail the test, with everybody's stacks, if it still runs."""
        try:
            return self.process.wait(max(timeout_s, 0.0))
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"still running after {timeout_s:.0f} s: {self.stacks()}"
            ) from None

    def wait_for(self, text: str, timeout_s: float) -> None:
        """Return once it has written a text."""
        deadline = time.monotonic() + timeout_s
        while text not in self.text():
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, f"no {text!r} yet: {self.stacks()}"
            time.sleep(0.1)

    def below(self) -> list[psutil.Process]:
        """The processes that it has started, and those that they have."""
        with suppress(psutil.Error):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def stacks(self) -> str:
        """End it, so that each of its Python processes writes its stacks first."""
        for one in [*self.below(), self.process]:
            with suppress(psutil.Error, ProcessLookupError):
                os.kill(one.pid, signal.SIGABRT)
        time.sleep(_STACKS_S)
        return self.text()


@contextmanager
def running(words: Sequence[str], output: Path, **environment: str) -> Iterator[Command]:
    """``python words...`` in the repository's root; nothing of it is left behind the block."""
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env={
                **os.environ,
                **{"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
                **{"PYTHONFAULTHANDLER": "1", "PYTHONPATH": str(ROOT)},
                **environment,
            },
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    command = Command(process, output)
    try:
        yield command
    finally:
        below = command.below()
        process.kill()
        process.wait()
        for one in below:
            with suppress(psutil.Error):
                one.kill()

"""Starts commands, or a command's ranks, as processes, which may die, stop or get signals.

They are forked from the server of tests/support/ranks.py and meet at a port of this machine, as
ranks that torchrun starts do; rank 0 holds the store. What a process writes goes to a file.
"""

import gc
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import psutil

from megatron_hdp.processes.ports import free_port
from tests.support.ranks import _context, _server_environment

ROOT = Path(__file__).parents[2]
_STACKS_S = 10.0


@dataclass
class Started:
    """One rank's process."""

    process: ForkServerProcess
    output: Path

    def wait(self, timeout_s: float) -> int:
        """Exit code, -N for signal N; fails the test if the process is still running."""
        self.process.join(timeout_s)
        assert self.process.exitcode is not None, f"still running: {self.text()}"
        return self.process.exitcode

    def wait_for(self, text: str, timeout_s: float) -> None:
        """Returns once the process has written `text`."""
        until(lambda: text in self.text(), timeout_s, [self])

    def text(self) -> str:
        """What the process has written to standard output and error."""
        return self.output.read_text() if self.output.exists() else ""


def until(
    is_so: Callable[[], Any], timeout_s: float, ranks: Sequence[Started] = (), sleep_s: float = 0.02
) -> None:
    """Returns once something is so; fails the test where it takes too long or a rank ends first."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        in_time = time.monotonic() < deadline and all(one.process.is_alive() for one in ranks)
        assert in_time, [one.text() for one in ranks]
        time.sleep(sleep_s)


@contextmanager
def started(
    num_ranks: int, folder: Path, function: Callable[..., None], *args: Any
) -> Iterator[list[Started]]:
    """Processes that call ``function(*args)`` with torchrun's environment; killed on leaving."""
    port = free_port()
    ranks: list[Started] = []
    try:
        with _server_environment():
            for rank in range(num_ranks):
                output = folder / f"output-{rank}-{port}"
                environment = {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(num_ranks),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "GLOO_SOCKET_IFNAME": "lo",
                }
                process = _context.Process(target=_main, args=(output, environment, function, args))
                process.start()
                ranks.append(Started(process, output))
        yield ranks
    finally:
        for started_rank in ranks:
            started_rank.process.kill()
            started_rank.process.join()


def run_script(
    script: Path, *arguments: str, timeout_s: float = 300, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs ``python script arguments``, forked from the server so that nothing is imported anew.

    Raises:
        subprocess.TimeoutExpired: it ran longer than `timeout_s`.
    """
    command = [str(script), *arguments]
    with tempfile.TemporaryDirectory(prefix="script-") as folder:
        written = [Path(folder, name) for name in ("stdout", "stderr")]
        with _server_environment():
            process = _context.Process(target=_script_main, args=(written, environment, command))
            process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(command, timeout_s, *map(Path.read_text, written))
        texts = [path.read_text() for path in written]
        return subprocess.CompletedProcess(command, process.exitcode, *texts)


def _script_main(written: list[Path], environment: dict[str, str], command: list[str]) -> None:
    _begin(written, environment)
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).parent))
    runpy.run_path(command[0], run_name="__main__")


def _main(
    output: Path, environment: dict[str, str], function: Callable[..., None], args: Any
) -> None:
    _begin([output, output], environment)
    warnings.simplefilter("ignore")
    function(*args)


def _begin(written: Sequence[Path], environment: dict[str, str]) -> None:
    """Standard output and error go to files, from here on in one thread."""
    import torch

    gc.freeze()  # as `ranks` does
    for descriptor, path in enumerate(written, start=1):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    os.environ.update(environment)
    torch.set_num_threads(1)


def run_python(*arguments, path=(), cwd=ROOT, timeout_s=240, **environment):
    """A process of this Python that has ended; it finds the folders of `path` and the project.

    It compiles no functions of Megatron's, which it would prepare for when it imports Megatron.
    """
    folders = [*map(str, path), str(ROOT), os.environ.get("PYTHONPATH", "")]
    found = {"PYTHONPATH": os.pathsep.join(filter(None, folders)), "PYTHONWARNINGS": "ignore"}
    found |= {"TORCHDYNAMO_DISABLE": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=os.environ | found | environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


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

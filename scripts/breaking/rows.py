"""A row: a function that tries to break something; run in a folder and a process of its own."""

import contextlib
import io
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_hdp.processes import end_with_parent

Try = tuple[str, bool, str]
"""What was tried, whether it held, and a note."""
Function = Callable[[Path], Iterable[Try]]


@dataclass(frozen=True)
class Row:
    """One function of the table."""

    name: str
    room: str
    limit_s: float
    function: Function


@dataclass(frozen=True)
class Result:
    """What came of a row."""

    row: Row
    tries: tuple[Try, ...]
    seconds: float
    reason: str | None = None
    """Why it did not come to its end."""

    @property
    def broken(self) -> list[Try]:
        """The tries that did not hold."""
        return [one for one in self.tries if not one[1]]

    @property
    def has_held(self) -> bool:
        """Whether it came to its end, with tries that all held."""
        return bool(self.tries) and not self.broken and self.reason is None


ROWS: dict[str, Row] = {}


def row(room: str, limit_s: float = 120.0) -> Callable[[Function], Function]:
    """Declare a function as a row; it yields its tries, in a folder that is removed afterwards."""

    def declare(function: Function) -> Function:
        name = function.__name__
        assert name not in ROWS, name
        ROWS[name] = Row(name, room, limit_s, function)
        return function

    return declare


def run(one: Row) -> Result:
    """Run a row in a process group of its own, which is killed at the time limit."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="hb-"))  # short: Ray's sockets lie below it
    process = context.Process(target=_in_process, args=(one, folder, sender, os.getpid()))
    process.start()
    assert process.pid is not None
    sender.close()
    tries: list[Try] = []
    reason: str | None = f"the time limit of {one.limit_s:,.0f} s"
    try:
        while receiver.poll(max(0.0, began + one.limit_s - time.monotonic())):
            try:
                found = receiver.recv()
            except EOFError:
                reason = "it ended without a result"
                break
            if not isinstance(found, tuple):
                reason = found
                break
            tries.append(found)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
        shutil.rmtree(folder, ignore_errors=True)
    return Result(one, tuple(tries), time.monotonic() - began, reason)


def _in_process(
    one: Row, folder: Path, sender: "multiprocessing.connection.Connection", parent: int
) -> None:
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    end_with_parent(parent, signal.SIGTERM)
    os.chdir(folder)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # bars of progress, lines of ranks; what a row finds it sends
        os.dup2(nowhere, stream)
    reason = None
    try:
        for found in one.function(folder):
            sender.send(found)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    sender.send(reason)


def command(*words: object) -> tuple[int, str]:
    """The exit code of a ``megatron-hdp`` command run here, and all that it said."""
    from megatron_hdp.cli.main import main

    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            code = main([str(word) for word in words])
        except SystemExit as leaving:
            code = int(leaving.code or 0)
    return code, said.getvalue()


def refused(what: str, *words: object, told: Iterable[str] = ()) -> Iterator[Try]:
    """A try that must end with exit code 1 or 2 and a message that names everything `told`."""
    try:
        code, said = command(*words)
    except Exception as error:
        yield what, False, f"{type(error).__name__}: {error}"
        return
    held = code in (1, 2) and "Traceback" not in said and len(said) < 4000
    yield what, held and all(word in said for word in told), f"exit {code}: {said[-300:]}"

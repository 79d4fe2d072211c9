"""Runs a command until its deadline: its output goes on as it comes, and is kept."""

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Finished:
    """A command that has ended, by itself or at its deadline."""

    code: int
    lines: list[str]
    timed_out: bool


def run(
    command: Sequence[str | Path],
    *,
    deadline_s: float,
    say: Callable[[str], object],
    environment: Mapping[str, str],
    folder: Path,
) -> Finished:
    """Run `command` in a folder; at the deadline it and all that it started are killed.

    Args:
        command: program and arguments.
        deadline_s: seconds it may take.
        say: takes each line of its output.
        environment: of the command.
        folder: where it runs.
    """
    process = subprocess.Popen(
        [str(part) for part in command],
        cwd=folder,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # so that what it starts can be killed with it
    )
    lines: list[str] = []

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            say(lines[-1])

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    timed_out = False
    try:
        process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        timed_out = True
    finally:
        with suppress(ProcessLookupError):  # all of it has ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    reader.join(5)
    return Finished(process.returncode, list(lines), timed_out)

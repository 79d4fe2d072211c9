"""Keeps a node's host: ``python -m megatron_hdp.data_plane.keeper FOLDER SHARED WORDS...``.

A rank starts it, it starts the host, and waits, small and idle. When the host has ended, however it
did, or the rank has, nothing of theirs outlives it: orphans of the host become the keeper's
children, so it finds and kills them, Ray's agents too, and it removes a killed rank's files.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil

from megatron_hdp.data_plane.cluster.job_folder import remove_dead
from megatron_hdp.data_plane.names import END_SIGNAL, WARNINGS
from megatron_hdp.data_plane.node_files import mark_lost
from megatron_hdp.exit_codes import ExitCode
from megatron_hdp.processes import adopt_orphans, end_with_parent

_HOST = "megatron_hdp.data_plane.host"
_END_S = 5.0  # in which a host that was told to end does
_EVER_S = 1e9
_HEARD = {signal.SIGCHLD, END_SIGNAL}


def main() -> int:
    """Run the host until it has ended and the rank has asked for it, or has died."""
    folder, shared, *words = sys.argv[1:]
    signal.pthread_sigmask(signal.SIG_BLOCK, {*_HEARD, *WARNINGS})
    adopt_orphans()
    host = subprocess.Popen(
        [sys.executable, "-m", _HOST, *words],
        close_fds=False,  # it has the job's locks
        preexec_fn=partial(_become_host, os.getpid()),
    ).pid
    os.closerange(3, 1 + max(map(int, os.listdir("/dev/fd"))))  # and the keeper does not
    code, is_told = _wait(host)
    _kill_all()
    if code and not is_told:
        why = f"its process, {_HOST}, has ended with {code}"
        with suppress(OSError):  # no room
            mark_lost(Path(folder), why)
            print(f"data plane: {why}", flush=True)
    if not is_told:
        signal.sigwait({END_SIGNAL})
    for one in (folder, shared):  # which the rank has locked, if it lives
        remove_dead(Path(one))
    return ExitCode.DONE


def begin(parent: int) -> None:
    """Become the keeper of a rank, in a process that the rank has forked: hear of its end."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {END_SIGNAL})
    end_with_parent(parent, END_SIGNAL)


def _become_host(keeper: int) -> None:
    end_with_parent(keeper)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)


def _wait(host: int) -> tuple[int, bool]:
    """Return the host's exit code once it has ended, and whether it was told to."""
    deadline = None
    while True:
        for process, code in _reaped():
            if process == host:
                return code, deadline is not None
        left_s = _EVER_S if deadline is None else max(deadline - time.monotonic(), 0.0)
        heard = signal.sigtimedwait(_HEARD, left_s)
        if heard is None:
            os.kill(host, signal.SIGKILL)
        elif heard.si_signo == END_SIGNAL:
            deadline = time.monotonic() + _END_S
            os.kill(host, END_SIGNAL)


def _reaped() -> Iterator[tuple[int, int]]:
    """Children that have ended since the last time, and their exit codes."""
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            yield found[0], os.waitstatus_to_exitcode(found[1])


def _kill_all() -> None:
    """Kill what is below this process until nothing is."""
    with suppress(ChildProcessError):
        while True:
            for one in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    one.kill()
            os.wait()


if __name__ == "__main__":
    sys.exit(main())

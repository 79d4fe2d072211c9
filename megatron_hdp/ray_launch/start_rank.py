"""Turns itself into a rank: a process that a warning does not end before it listens.

Called by its path, without the package: ``python start_rank.py PARENT COMMAND...``. What Ray's
processes block (see `cluster`) is open again, warnings are ignored until the rank listens, and the
rank ends with the process that started it (on Linux).
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal that comes when the parent ends


def main(parent: int, command: list[str]) -> None:
    """Becomes `command`; `parent` is the process id of the starter."""
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the signal was asked for
        os._exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])

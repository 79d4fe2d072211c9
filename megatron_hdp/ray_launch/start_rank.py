"""Turns itself into a rank: a process that a warning does not end before it listens.

Called by its path, without other packages: ``python -S start_rank.py PARENT COMMAND...``. What
Ray's processes block (see `cluster`) is open again, warnings are ignored until the rank listens,
and the rank ends with the process that started it (on Linux; elsewhere our commands see to it).
"""

import os
import signal
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[2])

from megatron_hdp.processes import end_with_parent  # noqa: E402


def main(parent: int, command: list[str]) -> None:
    """Becomes `command`; `parent` is the process id of the starter."""
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    end_with_parent(parent)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])

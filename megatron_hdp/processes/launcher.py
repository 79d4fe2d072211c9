"""A rank ends with the process that launched it, whatever it does: none waits for a dead job.

Needs nothing but the standard library, so that it comes before all that takes time to import.
"""

from __future__ import annotations

import os
import socket
import threading
import time

from megatron_hdp.exit_codes import ExitCode
from megatron_hdp.processes.children import end_with_parent

_TORCHRUN = "TORCHELASTIC_RUN_ID"

_CHECK_S = 1.0
_CONNECT_S = 10.0
_watching = False


def end_with_launcher() -> None:
    """This process ends within seconds once its launcher, the parent process, is gone.

    Call it first of all; a second call does nothing more. In a process that torchrun did not start
    (the environment tells) it does nothing either: what a user starts behind ``nohup`` or ``&``
    outlives the shell.

    On Linux the kernel ends it, in the middle of anything; elsewhere a thread looks once a second.
    """
    if _TORCHRUN not in os.environ:
        return
    launcher = os.getppid()
    if not end_with_parent(launcher):
        _watch(launcher)
    if _torchrun_is_gone():
        _end("torchrun, which started it, is gone")


def _torchrun_is_gone() -> bool:
    """Whether it had ended before this process could ask for its end; known on its first node.

    There it listens, as the job's store, before it starts a rank.
    """
    get = os.environ.get
    if get("TORCHELASTIC_USE_AGENT_STORE") != "True" or get("GROUP_RANK") != "0":
        return False
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        socket.create_connection(address, timeout=_CONNECT_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False  # joining the job says what is wrong with the address
    return False


def _watch(launcher: int) -> None:
    global _watching
    if _watching:
        return
    _watching = True

    def look() -> None:
        while os.getppid() == launcher:
            time.sleep(_CHECK_S)
        _end(f"process {launcher}, which started it, is gone")

    threading.Thread(target=look, name="launcher-watch", daemon=True).start()


def _end(why: str) -> None:
    rank = os.environ.get("RANK", "?")
    os.write(2, f"megatron_hdp: rank {rank} ends: {why}\n".encode())
    os._exit(ExitCode.FAILED)

"""Processes end with the one that started them, so that none outlives a rank that is killed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal that comes when the parent ends
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
_bound = False
_parent = 0


@contextmanager
def bound_to_this_process() -> Iterator[None]:
    """What is forked in the block, and what that forks, gets SIGKILL when its parent ends.

    Must be entered by the main thread. Other systems than Linux leave such processes alone.
    """
    global _bound
    before, _bound = _bound, True
    try:
        yield
    finally:
        _bound = before


def end_with_parent(parent: int) -> bool:
    """This process gets SIGKILL when its parent ends, the thread of it that started this process.

    Args:
        parent: its process id; if that has ended already, so does this process.

    Returns:
        False on other systems than Linux, where nothing happens.
    """
    if _libc is None:
        return False
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the signal was asked for
        os._exit(1)
    return True


def _before_fork() -> None:
    global _parent
    _parent = os.getpid()


def _in_child() -> None:
    if _bound:
        end_with_parent(_parent)


os.register_at_fork(before=_before_fork, after_in_child=_in_child)

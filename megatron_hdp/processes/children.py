"""Processes end with the one that started them, so that none outlives a rank that is killed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import spawn
from typing import Any

_PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal that comes when the parent ends
_PR_SET_CHILD_SUBREAPER = 36  # orphans below this process become its children
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
_bound = False
_parent = 0

# What a spawned interpreter runs first; nothing of ours may be on its path yet. What it forks is
# bound to it, too.
_BOND = """\
import ctypes, os
_prctl = ctypes.CDLL(None).prctl
_prctl({option}, {number})
os.getppid() == {parent} or os._exit(1)
os.register_at_fork(after_in_child=lambda: _prctl({option}, {number}))
"""


@contextmanager
def bound_to_this_process() -> Iterator[None]:
    """What is forked or spawned in the block, and what that forks, is killed when its parent ends.

    Must be entered by the main thread. Other systems than Linux leave such processes alone.
    """
    global _bound
    before, _bound = _bound, True
    command_line = spawn.get_command_line
    if _libc is not None:
        spawn.get_command_line = _with_bond(command_line)
    try:
        yield
    finally:
        _bound = before
        spawn.get_command_line = command_line


def end_with_parent(parent: int, number: int = signal.SIGKILL) -> bool:
    """This process gets a signal when its parent ends, the thread of it that started this process.

    Args:
        parent: its process id; if that has ended already, so does this process.
        number: of the signal.

    Returns:
        False on other systems than Linux, where nothing happens.
    """
    if _libc is None:
        return False
    _libc.prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before the signal was asked for
        os._exit(1)
    return True


def adopt_orphans() -> None:
    """What is started below this process, at any depth, becomes its child when its parent ends."""
    if _libc is not None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _with_bond(command_line: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """What multiprocessing starts an interpreter with, and the bond before it."""

    def bound(**kwargs: Any) -> list[str]:
        command = command_line(**kwargs)
        if "-c" in command:  # else a frozen program, which starts itself
            program = command.index("-c") + 1
            bond = _BOND.format(
                option=_PR_SET_PDEATHSIG, number=int(signal.SIGKILL), parent=os.getpid()
            )
            command[program] = bond + command[program]
        return command

    return bound


def _before_fork() -> None:
    global _parent
    _parent = os.getpid()


def _in_child() -> None:
    if _bound:
        end_with_parent(_parent)


os.register_at_fork(before=_before_fork, after_in_child=_in_child)

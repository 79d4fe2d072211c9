"""SIGTERM, SIGUSR1 and Ctrl-C ask a job to end after its step: noted at once, agreed on later."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

import torch

from megatron_hdp.exit_codes import ExitCode
from megatron_hdp.runtime.gathering import largest

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

_SAME_PRESS_S = 1.0  # a launcher in the same terminal passes the Ctrl-C on that ranks got already


class StopSignals:
    """While entered, these signals are noted instead of ending the process.

    A context manager of the process's main thread; leaving it restores what was there before. A
    signal may come any number of times, and to any rank; but a second Ctrl-C ends this process at
    once, with `ExitCode.INTERRUPTED`. Signals are known as they come, to a thread of their own: the
    main thread may be in the middle of a call that lets no Python run.
    """

    def __init__(self) -> None:
        self._received = 0
        self._interrupted_at: float | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._wakeup_fd_before = -1

    def __enter__(self) -> StopSignals:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._thread = threading.Thread(target=self._listen, name="stop-signals", daemon=True)
        self._thread.start()
        self._wakeup_fd_before = signal.set_wakeup_fd(
            self._writer.fileno(), warn_on_full_buffer=False
        )
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        stack: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: a handler not of Python's
        signal.set_wakeup_fd(self._wakeup_fd_before)
        self._writer.close()
        self._thread.join()
        self._reader.close()

    def received(self) -> bool:
        """Whether one has come to this process."""
        return self._received != 0

    def agreed(self, device: torch.device) -> signal.Signals | None:
        """A signal that some rank has received, the same on every rank, or None.

        Costs one all-reduce of a word; every rank must call it.

        Args:
            device: where the backend wants its tensors.
        """
        return self.agreed_with((), device)[0]

    def agreed_with(
        self, more: Sequence[int], device: torch.device
    ) -> tuple[signal.Signals | None, list[int]]:
        """The same, and the largest of other numbers of all ranks, in one exchange."""
        number, *others = largest([self._received, *more], device)
        return signal.Signals(number) if number else None, others

    def _listen(self) -> None:
        while numbers := self._reader.recv(64):  # what C's handler wrote: a byte a signal
            for number in numbers:
                if number in SIGNALS:  # not of another handler in this process
                    self._count(number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = number

    def _count(self, number: int) -> None:
        self._received = number
        if number != signal.SIGINT:
            return
        now = time.monotonic()
        if self._interrupted_at is None:
            self._interrupted_at = now
        elif now - self._interrupted_at > _SAME_PRESS_S:
            os.write(2, b"interrupted a second time: ends at once, saves nothing more\n")
            os._exit(ExitCode.INTERRUPTED)


def _in_child() -> None:
    """A helper forked from this process must not write its own signals into this one's socket."""
    handler = signal.getsignal(signal.SIGTERM)
    if isinstance(getattr(handler, "__self__", None), StopSignals):
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_in_child)

"""SIGTERM and SIGUSR1 ask a job to end after its step: noted when they come, agreed on by ranks."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

import torch

from megatron_hdp.runtime.health.agreement import largest

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """While entered, these signals are noted instead of ending the process.

    A context manager of the process's main thread; leaving it restores what was there before. A
    signal may come any number of times, and to any rank.
    """

    def __init__(self) -> None:
        self._received = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
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

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = number

    def agreed(self, device: torch.device) -> signal.Signals | None:
        """A signal that some rank has received, the same on every rank, or None.

        Costs one all-reduce of a word; every rank must call it.

        Args:
            device: where the backend wants its tensors.
        """
        (number,) = largest([self._received], device)
        return signal.Signals(number) if number else None

"""Asks again and again how far the device has come, in a thread of its own: asking may block."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from megatron_hdp.runtime.device_progress import Reached


@dataclass(frozen=True)
class Answer:
    """What was found, and since when it holds."""

    reached: Reached
    asked_at: float
    """In seconds of `time.monotonic`, before it was asked."""


class DeviceWatch:
    """A thread that asks; whoever reads `answer` never waits.

    Args:
        ask: how far the device has come; None as long as there is none.
        interval_s: seconds between two questions.

    Attributes:
        answer: the latest; None before the first.
    """

    def __init__(self, ask: Callable[[], Reached | None], interval_s: float) -> None:
        self._ask = ask
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="heartbeat-device", daemon=True)
        self.answer: Answer | None = None

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, once a question that blocks is answered; waits for nothing."""
        self._stop.set()

    def _watch(self) -> None:
        while not self._stop.wait(self._interval_s):
            asked_at = time.monotonic()
            reached = self._ask()
            self.answer = None if reached is None else Answer(reached, asked_at)

"""Heartbeats of a loop of the caller's own: they judge within calls, and know who lives between."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_hdp.runtime.health.diagnosis import Status
from megatron_hdp.runtime.health.heartbeat import Heartbeat, RankFailure
from megatron_hdp.runtime.timeline import Timeline


class CallsHeartbeat(Heartbeat):
    """Watches over calls that all ranks make in one order; between them a rank is free.

    In a call, of the thread that makes it, all is as in `Heartbeat`; the first call of a name may
    take its time. Who is between two calls lives, and is not said to stall, however long others
    wait for it. From `begin` to `end` every rank's heartbeats go on. Arguments: see `Heartbeat`.
    """

    def __init__(self, timeline: Timeline, **options: Any) -> None:
        super().__init__(timeline, **options)
        self._is_in_call = False
        self._is_over: str | None = None
        self._left_at = time.monotonic()
        self._calls: Counter[str] = Counter()

    def begin(self) -> None:
        """Starts the threads."""
        self.__enter__()

    def end(self) -> None:
        """Ends the threads."""
        self._leave()
        if threading.current_thread() is not self._thread:  # which may collect garbage
            self._thread.join()

    @contextmanager
    def call(self, name: str, shared: tuple[type[Exception], ...]) -> Iterator[None]:
        """Around a call.

        Args:
            name: of the call.
            shared: errors that all ranks raise in the same place: of these the others know, and
                calls may follow. After any other error none does.

        Raises:
            RankFailure: a rank has failed in an earlier call, or communication fails in this one.
        """
        if why := self._others.failure or self._is_over or self._others.trouble():
            raise RankFailure(f"the session has ended, because a call before has failed: {why}")
        self._calls[name] += 1
        self._step, self._steps_begun = self._step + 1, self._calls[name]
        self._watched = threading.get_ident()
        self._progress = None
        self._is_in_call = True
        try:
            yield
        except BaseException as error:
            with self._decision:
                failure = None if isinstance(error, shared) else self._told(error)
                if not isinstance(error, shared):
                    self._is_over = str(failure or f"{type(error).__name__}: {error}")
                self._leave_call()
            if failure is not None:
                raise failure from error
            raise
        with self._decision:
            self._leave_call()

    def _leave_call(self) -> None:
        self._left_at = time.monotonic()
        self._is_in_call = False

    def _sample(self) -> Status:
        if self._is_in_call:
            return super()._sample()
        return Status(
            host=self._host,
            step=0,
            activity=f"the caller's own code after {self._step} calls",
            call="no call runs",
            waits=False,
            still_s=time.monotonic() - self._left_at,
            is_free=True,
        )

    def _reason_to_end(self, status: Status) -> str | None:
        return None if status.is_free else super()._reason_to_end(status)

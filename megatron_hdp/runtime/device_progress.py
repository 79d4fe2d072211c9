"""What a device has reached of what the main thread launched on it, for other threads to ask.

The main thread adds a mark wherever a span begins or ends: the clock's event there, and what the
device does until it has passed it. Marks stand in the order of launches, so the first one that is
not passed tells what the device is doing; it is found by halving. Streams beside the main one are
part of that order: what follows on the main stream waits for them anyway.

A mark costs the main thread some microseconds, of which recording the event is the larger part; the
events of spans are there already.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from megatron_hdp.runtime.clocks import Clock, Moment


@dataclass(frozen=True)
class Reached:
    """How far a device has come."""

    number: int
    """Of marks that it has passed; it gets on as long as this grows."""
    kind: str | None
    """Kind of the span that it is in, None outside of any."""
    micro_batch: int | None
    is_idle: bool
    """True if it has passed all marks: what it does then, the main thread knows."""


@dataclass(slots=True)
class _Mark:
    number: int
    moment: Moment
    kind: str | None
    micro_batch: int | None
    is_kept: bool
    """True if the moment's time is wanted by someone, who gives it back to the clock."""
    is_passed: bool = False


class DeviceProgress:
    """The marks of one main thread; `reached` may be called by another one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held for moments, never while the device is asked
        self._marks: deque[_Mark] = deque()
        self._next = 0
        self._known = 0  # marks that the asking thread has found passed

    def add(
        self, moment: Moment, kind: str | None, micro_batch: int | None, is_kept: bool = True
    ) -> int:
        """Adds a mark, until which the device is in a span of this kind; returns its number.

        Args:
            moment: recorded just now.
            kind: of the innermost span there; None outside of any.
            micro_batch: of that span.
            is_kept: see `forget_until`.
        """
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._marks.append(_Mark(number, moment, kind, micro_batch, is_kept))
        return number

    def forget_until(self, number: int, clock: Clock) -> None:
        """The device has passed the marks up to this one, as the main thread knows.

        To be called before the clock uses their moments again. Moments that nobody else keeps go
        back to the clock here.
        """
        with self._lock:
            while self._marks and self._marks[0].number <= number:
                mark = self._marks.popleft()
                mark.is_passed = True
                if not mark.is_kept:
                    clock.forget(mark.moment)

    def forget_all(self, clock: Clock) -> None:
        """The same for all marks."""
        self.forget_until(self._next, clock)

    def reached(self, clock: Clock) -> Reached:
        """How far the device has come; asks it, which may take long. For one thread alone."""
        found: _Mark | None = None
        first, following = self._known, self._next  # between these is the first one not passed
        while first < following:
            middle = (first + following) // 2
            mark = self._mark(middle)
            # a moment that was used again meanwhile belongs to a mark that is passed by then
            if mark is None or clock.has_passed(mark.moment) or mark.is_passed:
                first = middle + 1
            else:
                following, found = middle, mark
        self._known = first
        if found is None:
            return Reached(first, None, None, is_idle=True)
        return Reached(first, found.kind, found.micro_batch, is_idle=False)

    def _mark(self, number: int) -> _Mark | None:
        """The mark of this number; None if it is forgotten."""
        with self._lock:
            index = number - self._next + len(self._marks)
            return self._marks[index] if index >= 0 else None

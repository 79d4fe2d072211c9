"""What time it is: on a CPU when the program is there, on a GPU when its stream gets there.

Work on a GPU runs after it was launched, so the CPU's clock would time launches. There a moment is
an event on the current stream; how late it was is known once the device has passed it. All times
are seconds of `time.perf_counter`, to which a device's are tied anew at every `align`.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch

Moment: TypeAlias = Any
"""A point in time: a float, in seconds, or what its clock turns into one."""


class Clock:
    """What a timeline takes its times from: here the CPU's, which has done its work on return.

    Attributes:
        is_late: True if a moment's time is known only after it has been.
    """

    is_late = False

    def now(self) -> Moment:
        """This moment; never waits for the device."""
        return time.perf_counter()

    def align(self) -> float:
        """Waits for the device, ties its times to the CPU's; returns the time now.

        Moments from before must have been turned into seconds.
        """
        return time.perf_counter()

    def seconds(self, moment: Moment) -> float:
        """When `moment` was, once the device is past it; to be asked once for each."""
        return float(moment)

    def forget(self, moment: Moment) -> None:
        """Nobody wants to know when `moment` was, and the device is past it."""

    def has_passed(self, moment: Moment) -> bool:
        """Whether the device is past it; any thread may ask. It may take as long as a launch."""
        return True


class DeviceClock(Clock):
    """Events on the current stream; each is used again once its time is known.

    The time of an event counts from the one of the latest `align`, which is exact to what the CPU
    takes to notice that the device got there, some ten microseconds, alike for the whole step.

    Args:
        new_event: makes an event with ``record()``, ``synchronize()``, ``query()`` and
            ``elapsed_time(later)`` in milliseconds, as `torch.cuda.Event` with timing.
        query: asks an event whether the device is past it; its own ``query()`` unless given.
    """

    is_late = True

    def __init__(
        self, new_event: Callable[[], Any], query: Callable[[Any], bool] | None = None
    ) -> None:
        self._new_event = new_event
        self._query = query or (lambda event: bool(event.query()))
        self._free: list[Any] = []
        self._aligned = new_event()
        self.align()

    def now(self) -> Moment:
        """An event recorded on the current stream."""
        event = self._free.pop() if self._free else self._new_event()
        event.record()
        return event

    def align(self) -> float:
        """See `Clock.align`."""
        self._aligned.record()
        self._aligned.synchronize()
        self._aligned_s = time.perf_counter()
        return self._aligned_s

    def seconds(self, moment: Moment) -> float:
        """See `Clock.seconds`; a float, from before the timeline had this clock, stays itself."""
        if isinstance(moment, float):
            return moment
        moment.synchronize()
        self._free.append(moment)
        return self._aligned_s + float(self._aligned.elapsed_time(moment)) * 1e-3

    def forget(self, moment: Moment) -> None:
        """See `Clock.forget`."""
        if not isinstance(moment, float):
            self._free.append(moment)

    def has_passed(self, moment: Moment) -> bool:
        """See `Clock.has_passed`."""
        return isinstance(moment, float) or self._query(moment)


class DriverQuery:
    """Asks events by the driver itself: PyTorch's ``query()`` holds Python's lock meanwhile.

    Were the driver to let it wait, as it does with a launch while the device's queue is full, no
    thread of Python would run. A call through ctypes lets the others run.

    Args:
        driver: libcuda, loaded.

    Must be made by a thread that uses the device; any thread may ask.
    """

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._context = ctypes.c_void_p()
        driver.cuCtxGetCurrent(ctypes.byref(self._context))
        self._thread = threading.local()

    def __call__(self, event: Any) -> bool:
        """Whether the device is past a `torch.cuda.Event` that was recorded."""
        if not hasattr(self._thread, "is_ready"):
            self._driver.cuCtxSetCurrent(self._context)
            self._thread.is_ready = True
        return bool(self._driver.cuEventQuery(ctypes.c_void_p(event.cuda_event)) == 0)


def clock_of(device: torch.device) -> Clock:
    """The clock of what runs on `device`, of the current stream where that is a GPU."""
    if device.type == "cpu":
        return Clock()
    torch.cuda.synchronize(device)  # so that this thread has a context
    query = DriverQuery(ctypes.CDLL("libcuda.so.1"))
    return DeviceClock(partial(torch.cuda.Event, enable_timing=True), query)

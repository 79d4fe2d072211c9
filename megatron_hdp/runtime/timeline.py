"""Where a rank's time goes: what it does now, seconds by kind, and single spans while recording.

What it does now is what its main thread does. How long things took is told by a clock: the CPU's,
or on a GPU the device's (`runtime.clocks`), which knows once the device has got there.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import TracebackType

from megatron_hdp.runtime.clocks import Clock, Moment
from megatron_hdp.runtime.device_progress import DeviceProgress, Reached

FORWARD = "forward"
BACKWARD = "backward"
RING_WAIT = "ring wait"
PIPELINE_WAIT = "pipeline wait"
ENCODER = "encoder"
ROWS_WAIT = "wait for rows of items"
ROW_GRADIENTS_WAIT = "wait for gradients of rows of items"
SYNC = "gradient sync"
OPTIMIZER = "optimizer step"
START = "start-up"
CHECKPOINT = "checkpoint"
TO_HOST = "copy to the host"
TO_DEVICE = "copy to the device"
HOST_MEMORY = "allocation of host memory"
AGREEMENT = "agreement of all ranks"
DEVICE_WAIT = "wait for the device"
MEETING = "wait for ranks that prepare their data"
WAITS = frozenset(
    {
        *(RING_WAIT, PIPELINE_WAIT, ROWS_WAIT, ROW_GRADIENTS_WAIT, SYNC),
        *(AGREEMENT, DEVICE_WAIT, MEETING),
    }
)
"""What a main thread does while it may wait for other ranks. On a GPU the thread itself passes the
first five at once; it stands in the others, of the device's for what that waits for."""


@dataclass(frozen=True)
class Span:
    """One stretch of time, in seconds of `time.perf_counter`; waits lie inside other spans."""

    kind: str
    start_s: float
    end_s: float
    micro_batch: int | None
    """Index in the step's plan; None outside micro-batches and for padding."""
    chunk: int = 0
    """The model chunk (virtual stage) of a forward or backward, or of what lies inside; else 0."""
    part: int | None = None
    """The part of the micro-batch, of one that runs in parts."""


class _Block(AbstractContextManager[None]):
    """What the main thread does inside of a block. A class, as it costs a third of a generator.

    Args:
        moments: what to note when it begins and ends: the device's times (True), only that the
            device gets there (False) or nothing (None).
    """

    __slots__ = (
        *("_timeline", "_moments", "kind", "micro_batch", "chunk", "part"),
        *("cpu_start_s", "start", "mark"),
    )

    def __init__(
        self,
        timeline: Timeline,
        moments: bool | None,
        kind: str,
        micro_batch: int | None = None,
        chunk: int | None = None,
        part: int | None = None,
    ) -> None:
        self._timeline, self._moments = timeline, moments
        self.kind, self.micro_batch, self.chunk, self.part = kind, micro_batch, chunk, part
        self.mark = -1  # number of the mark at its end

    def __enter__(self) -> None:
        timeline = self._timeline
        enclosing = timeline._innermost()
        if enclosing is not None and self.micro_batch is None:
            self.micro_batch = enclosing.micro_batch
        if enclosing is not None and self.part is None:
            self.part = enclosing.part
        if self.chunk is None:
            self.chunk = enclosing.chunk if enclosing is not None else 0
        self.start: Moment = time.perf_counter()
        self.cpu_start_s = self.start
        timeline._open.append(self)
        timeline.changes += 1
        if self._moments is not None:
            start, _ = timeline._moment(enclosing, self._moments)
            if self._moments:
                self.start = start

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        timeline = self._timeline
        if self._moments is not None:
            end, self.mark = timeline._moment(self, self._moments)
            if self._moments:
                timeline._ended.append((self, end))
        timeline._open.pop()
        timeline.changes += 1
        if self._moments and not timeline._clock.is_late:
            timeline.settle()


class Timeline:
    """What the main thread of one rank does, nested spans of time; other threads may read it.

    On a GPU a span lasts from when the device's current stream reaches its beginning until it
    reaches its end. Around a transfer's ``wait()``, which there only makes the stream wait, that is
    how long the stream stood still.

    Args:
        clock: tells the times; the CPU's unless given.

    Attributes:
        started_s: when the step began: the latest `reset`, in seconds of `time.perf_counter`.
        spans: what ended since `start_recording`, as far as its times are known, or None while not
            recording.
        changes: how often a span began or ended; grows as long as the main thread gets on.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or Clock()
        self.started_s = time.perf_counter()
        self.spans: list[Span] | None = None
        self.changes = 0
        self._totals_s: defaultdict[str, float] = defaultdict(float)
        self._open: list[_Block] = []
        self._ended: deque[tuple[_Block, Moment]] = deque()  # times not asked for yet
        self._progress = DeviceProgress()

    def use(self, clock: Clock) -> None:
        """Takes the times from `clock` from now on."""
        self._know_all()
        self._clock = clock

    def span(
        self,
        kind: str,
        micro_batch: int | None = None,
        chunk: int | None = None,
        part: int | None = None,
    ) -> AbstractContextManager[None]:
        """Times the block; numbers that it lacks are those of the enclosing one."""
        return _Block(self, True, kind, micro_batch, chunk, part)

    @contextmanager
    def beside(self, kind: str, micro_batch: int | None) -> Iterator[None]:
        """Times what another thread or stream does, like a copy, while recording.

        On a GPU it is the stream that is current inside.
        """
        if self.spans is None:
            yield
            return
        block = _Block(self, True, kind, micro_batch, 0)
        block.start = self._clock.now()
        yield
        self._ended.append((block, self._clock.now()))

    @property
    def micro_batch(self) -> int | None:
        """The micro-batch that the main thread works for now."""
        return self._open[-1].micro_batch if self._open else None

    def noted(
        self, kind: str, micro_batch: int | None = None, chunk: int | None = None
    ) -> AbstractContextManager[None]:
        """Tells other threads, and what lies inside, what the block is, without timing it."""
        return _Block(self, None, kind, micro_batch, chunk)

    def marked(self, kind: str) -> AbstractContextManager[None]:
        """Like `noted`, and the device is found in it, too: two events that are not timed."""
        return _Block(self, False, kind)

    def _moment(self, innermost: _Block | None, is_kept: bool = True) -> tuple[Moment, int]:
        """This moment and the number of its mark; `innermost` is the span that it ends or is in."""
        if not self._clock.is_late:
            return (self._clock.now() if is_kept else None), -1
        moment = self._clock.now()
        kind, micro_batch = (innermost.kind, innermost.micro_batch) if innermost else (None, None)
        return moment, self._progress.add(moment, kind, micro_batch, is_kept)

    def _innermost(self) -> _Block | None:
        return self._open[-1] if self._open else None

    def reached(self) -> Reached | None:
        """How far the device has come; None where that is the CPU.

        For one other thread. Asking may take as long as a launch, so let nothing wait for it.
        """
        return self._progress.reached(self._clock) if self._clock.is_late else None

    def current(self) -> list[tuple[str, float, int | None]]:
        """The open spans, outermost first: kind, start on the CPU's clock, micro-batch."""
        return [(one.kind, one.cpu_start_s, one.micro_batch) for one in list(self._open)]

    @property
    def totals_s(self) -> defaultdict[str, float]:
        """Seconds spent in each kind of span since the latest `reset`; waits for the device."""
        self.settle()
        return self._totals_s

    def now(self) -> Moment:
        """This moment, for `since_start_s`."""
        return self._clock.now()

    def since_start_s(self, moment: Moment) -> float:
        """Seconds from the latest `reset` to a moment since; waits for the device, once for each.

        Args:
            moment: what `now` gave.
        """
        with self._device_noted():
            return self._clock.seconds(moment) - self.started_s

    def settle(self) -> None:
        """Waits until the device has passed every span that has ended, and takes their times."""
        if not self._ended:
            return
        with self._device_noted():
            self._take_times(lambda end: True)

    def settle_passed(self) -> None:
        """Takes the times of spans that the device has passed; waits for nothing.

        Asked now and then while the device is busy, the step's end has few left, when it is idle.
        """
        self._take_times(self._clock.has_passed)

    def _take_times(self, is_wanted: Callable[[Moment], bool]) -> None:
        """Of spans that have ended, in order, up to the first whose end is not wanted yet."""
        last_mark = -1
        while self._ended and is_wanted(self._ended[0][1]):
            one, end = self._ended.popleft()
            last_mark = max(last_mark, one.mark)
            start_s, end_s = self._clock.seconds(one.start), self._clock.seconds(end)
            self._totals_s[one.kind] += end_s - start_s
            if self.spans is not None:
                about = one.micro_batch, one.chunk or 0, one.part
                self.spans.append(Span(one.kind, start_s, end_s, *about))
        self._progress.forget_until(last_mark, self._clock)

    def _device_noted(self) -> AbstractContextManager[None]:
        """What may wait for the device."""
        return self.noted(DEVICE_WAIT) if self._clock.is_late else nullcontext()

    def _know_all(self) -> None:
        """Turns every moment into seconds, so that the clock can be set anew."""
        self.settle()
        for one in self._open:
            one.start = self._clock.seconds(one.start)
        self._progress.forget_all(self._clock)

    def reset(self) -> None:
        """A step begins: counts anew; waits for the device, which has nothing to do then."""
        with self._device_noted():
            self._know_all()
            self.started_s = self._clock.align()
        self._totals_s.clear()

    def start_recording(self) -> None:
        """Keeps single spans from now on."""
        self.settle()
        self.spans = []

    def stop_recording(self) -> list[Span]:
        """What was recorded; nothing is kept any more."""
        self.settle()
        spans, self.spans = self.spans or [], None
        return spans

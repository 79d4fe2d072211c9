"""Where a rank's time goes: what it does now, seconds by kind, and single spans while recording."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

FORWARD = "forward"
BACKWARD = "backward"
RING_WAIT = "ring wait"
PIPELINE_WAIT = "pipeline wait"
SYNC = "gradient sync"
OPTIMIZER = "optimizer step"
START = "start-up"
CHECKPOINT = "checkpoint"
WAITS = frozenset({RING_WAIT, PIPELINE_WAIT, SYNC})


@dataclass(frozen=True)
class Span:
    """One stretch of time, in seconds of `time.perf_counter`; waits lie inside other spans."""

    kind: str
    start_s: float
    end_s: float
    micro_batch: int | None
    """Index in the step's plan; None outside micro-batches and for padding."""


class Timeline:
    """What the main thread of one rank does, nested spans of time; other threads may read it.

    Attributes:
        started_s: when the step began: the latest `reset`, in seconds of `time.perf_counter`.
        totals_s: seconds spent in each kind of span since then.
        spans: what ended since `start_recording`, or None while not recording.
        changes: how often a span began or ended; grows as long as the main thread gets on.
    """

    def __init__(self) -> None:
        self.started_s = time.perf_counter()
        self.totals_s: defaultdict[str, float] = defaultdict(float)
        self.spans: list[Span] | None = None
        self.changes = 0
        self._open: list[tuple[str, float, int | None]] = []

    @contextmanager
    def span(self, kind: str, micro_batch: int | None = None) -> Iterator[None]:
        """Times the block; without an index of its own, it belongs to the enclosing micro-batch."""
        if micro_batch is None and self._open:
            micro_batch = self._open[-1][2]
        start = time.perf_counter()
        self._open.append((kind, start, micro_batch))
        self.changes += 1
        try:
            yield
        finally:
            self._open.pop()
            self.changes += 1
            end = time.perf_counter()
            self.totals_s[kind] += end - start
            if self.spans is not None:
                self.spans.append(Span(kind, start, end, micro_batch))

    def current(self) -> list[tuple[str, float, int | None]]:
        """The open spans, outermost first: kind, start in seconds, micro-batch."""
        return list(self._open)

    def reset(self) -> None:
        """A step begins: counts anew."""
        self.started_s = time.perf_counter()
        self.totals_s.clear()

    def start_recording(self) -> None:
        """Keeps single spans from now on."""
        self.spans = []

    def stop_recording(self) -> list[Span]:
        """What was recorded; nothing is kept any more."""
        spans, self.spans = self.spans or [], None
        return spans

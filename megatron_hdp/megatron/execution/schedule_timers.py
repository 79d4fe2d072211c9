"""Megatron's schedule says when it computes: its timers open and close the timeline's spans.

The schedule starts and stops a timer around the forward and the backward of every micro-batch. It
takes a rank's micro-batches in order, forward and backward each, so counting tells which one it is;
with several model chunks it comes to each once a chunk, in the order of its table, backward from
the last chunk to the first. Of a micro-batch in parts the timer only says which one it is: the
parts are timed one by one, without the waits for neighbouring stages between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

from megatron.core.timers import DummyTimer

from megatron_hdp.runtime.timeline import BACKWARD, FORWARD, Timeline

_UNUSED = DummyTimer()  # what the schedule times and the timeline does not


class Pass(NamedTuple):
    """A micro-batch's way through a model chunk."""

    micro_batch: int | None
    """Its index in the step's plan; None for padding."""
    chunk: int
    in_parts: bool = False
    """Whether its parts time themselves."""


@contextmanager
def noting_compute(config: Any, timeline: Timeline, passes: Sequence[Pass]) -> Iterator[None]:
    """Notes every forward and backward of the schedule that runs inside, whose timers are ours.

    `passes` are what this rank runs forward, in order, and so backward.
    """
    timers = _Timers(timeline, passes)
    before, config.timers = config.timers, timers
    try:
        yield
    finally:
        config.timers = before
        timers.close()


class _Timers:
    """What the schedule calls by the name of what it begins or ends; `megatron.core.Timers` is."""

    def __init__(self, timeline: Timeline, passes: Sequence[Pass]) -> None:
        last = max((one.chunk for one in passes), default=0)
        backwards = [one._replace(chunk=last - one.chunk) for one in passes]
        self._computing = {
            "forward-compute": _Computing(timeline, FORWARD, passes),
            "backward-compute": _Computing(timeline, BACKWARD, backwards),
        }

    def __call__(self, name: str, log_level: int | None = None) -> _Computing | DummyTimer:
        return self._computing.get(name, _UNUSED)

    def close(self) -> None:
        """Ends what an error left open."""
        for computing in self._computing.values():
            computing.stop()


class _Computing:
    """Spans of one kind, a micro-batch and its chunk each."""

    def __init__(self, timeline: Timeline, kind: str, passes: Sequence[Pass]) -> None:
        self._timeline = timeline
        self._kind = kind
        self._coming = iter(passes)
        self._open: AbstractContextManager[None] | None = None

    def start(self, barrier: bool = False) -> None:
        """The next micro-batch begins; never waits for other ranks."""
        index, chunk, in_parts = next(self._coming)
        timed_or_not = self._timeline.noted if in_parts else self._timeline.span
        self._open = timed_or_not(self._kind, index, chunk)
        self._open.__enter__()

    def stop(self, barrier: bool = False) -> None:
        """It has ended."""
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None
            self._timeline.settle_passed()

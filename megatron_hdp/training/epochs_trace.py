"""Traces steps of a job whose ranks come and go: members, and how they came from epoch to epoch.

A process of the trace is a member of the job: its rank may be another one in each epoch. Beside the
steps the file has what was done of a step that was left, the way of each member into the next epoch
and, for each one that was lost, the time from when others heard of it to when they continued. What
a lost member did in the step that was left is lost with it.

Whoever is the first rank writes the file, with what it holds already.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from megatron_hdp.megatron.parallel import compute_device
from megatron_hdp.megatron.step import HdpSteps
from megatron_hdp.runtime.epochs import Epoch
from megatron_hdp.runtime.gathering import from_first_rank, gathered_on_first, largest
from megatron_hdp.runtime.timeline import BACKWARD, FORWARD, Span
from megatron_hdp.simulator.trace_events import Event, bar, write_events
from megatron_hdp.training.step_trace import (
    ABOUT,
    JOB,
    LANES,
    RECOVERY,
    RankSpans,
    StepTracer,
    by_place,
    clock,
    name_events,
    numbered,
    process_of,
    span_event,
    thread_of,
)

_KINDS = {FORWARD, BACKWARD, *LANES}
_ABOUT = ABOUT | {
    "members": "a process is a member of the job: ranks are numbered anew in each epoch",
    "epochs": "from when the first member heard of the end of an epoch to when the next one began",
}


@dataclass(frozen=True)
class _Way:
    """A rank's way into an epoch."""

    epoch: int
    step: int
    """That all are behind."""
    why: str
    before: tuple[int, ...] | None
    """Members of the epoch before; None: this one was not in it."""
    members: tuple[int, ...]
    rank: RankSpans
    """Begins where all have entered the epoch, behind its spans."""
    recovery: list[Span]
    unwritten: tuple[int, RankSpans] | None
    """A step of which this rank does not know whether it was written."""


@dataclass(frozen=True)
class _Word:
    """What a rank has for the file when an epoch begins."""

    ways: list[_Way]
    is_begun: bool
    """Whether the file is of this job."""
    latest: tuple[int, float] | None
    """A step that the file has, and when it began on this rank's clock."""


class EpochsTracer(StepTracer):
    """A `StepTracer` that each process carries from epoch to epoch."""

    def __init__(self, folder: Path, steps: str, traced: HdpSteps, member: int) -> None:
        super().__init__(folder, steps, traced)
        self._member = member
        self._members: tuple[int, ...] | None = None
        self._ways: list[_Way] = []
        self._is_begun = False
        self._latest: tuple[int, float] | None = None
        self._unwritten: tuple[int, RankSpans] | None = None

    def begin(self, step: int) -> None:
        """See `StepTracer.begin`; all have agreed since the step before was written."""
        if self._unwritten is not None:
            number, mine = self._unwritten
            self._latest, self._unwritten, self._is_begun = (number, mine.started_s), None, True
        super().begin(step)

    def end(self, step: int) -> None:
        """See `StepTracer.end`; a step that an earlier epoch ran is in the file by `enter`."""
        if self._traced.executor.timeline.spans is not None:
            super().end(step)

    def _noted(self, step: int) -> RankSpans:
        mine = replace(super()._noted(step), member=self._member)
        self._unwritten = step, mine
        return mine

    def enter(self, epoch: Epoch, traced: HdpSteps, step: int, recovery: list[Span]) -> None:
        """Adds how ranks have come into an epoch; every rank must call this.

        Args:
            epoch: the one that begins.
            traced: its steps.
            step: the one that all are behind.
            recovery: this rank's way, the latest end last.
        """
        self._traced = traced
        before, self._members = self._members, epoch.members
        if not epoch.number or not self._steps.start - 1 <= step <= self._steps.stop:
            return
        device = compute_device()
        largest([0], device)  # nobody leaves it before all are there: machines are aligned by it
        timeline = traced.executor.timeline
        spans = [one for one in timeline.stop_recording() if one.kind in _KINDS]
        mine = RankSpans(traced.place, clock(), time.perf_counter(), spans, {}, 0.0, self._member)
        about = epoch.number, step, epoch.why, before, epoch.members
        self._ways.append(_Way(*about, mine, recovery, self._unwritten))
        words = gathered_on_first(_Word(self._ways, self._is_begun, self._latest))
        if words is not None:
            self._write_ways(words)
        from_first_rank(None, device)  # it is written
        self._ways, self._unwritten, self._is_begun = [], None, True

    def _write_ways(self, words: Sequence[_Word]) -> None:
        now = [word.ways[-1].rank for word in words]
        self._events, self._began_s = [], None
        if any(word.is_begun for word in words):
            self._read(words, now)
        held = {one["name"] for one in self._events if one["pid"] == JOB and one["ph"] == "X"}
        ways = [way for word in words for way in word.ways]
        if self._began_s is None:
            mine = words[0].ways[0]
            first = [*mine.recovery, *mine.rank.spans]
            first += [] if mine.unwritten is None else mine.unwritten[1].spans
            self._began_s = min(one.start_s for one in first)
        # all ways are drawn by the clocks' moment of this epoch
        moments = {rank.clock: rank.started_s for rank in reversed(now)}
        offset_s = now[0].started_s - self._began_s
        for number in sorted({way.epoch for way in ways}):
            those = [way for way in ways if way.epoch == number]
            if _name_of(number) not in held:
                self._name(by_place(way.rank for way in those))
                added = _way_events(those, held, moments, offset_s)
                known = {one["pid"] for one in self._events}  # who was lost may never have traced
                self._events += [one for one in added if one["pid"] in known]
        write_events(self._path, self._events, self._about())

    def _read(self, words: Sequence[_Word], now: Sequence[RankSpans]) -> None:
        """Takes over the file, whose first rank may be lost, and its clock with it."""
        if not self._path.exists():
            return
        document = orjson.loads(self._path.read_bytes())
        self._events, about = document["traceEvents"], document["otherData"]
        here = now[0].started_s
        for rank in now:
            if rank.clock == about["clock"]:
                self._began_s = about["began_s"] - rank.started_s + here
                return
        starts = {
            one["name"]: one["ts"] / 1e6
            for one in self._events
            if one["pid"] == JOB and one["ph"] == "X"
        }
        for word, rank in zip(words, now, strict=True):
            if word.latest is not None:
                step, started_s = word.latest
                self._began_s = started_s - starts[f"step {step}"] - rank.started_s + here
                return

    def _name(self, ranks: Sequence[RankSpans]) -> None:
        named = {one["pid"] for one in self._events}
        new = [rank for process, rank in numbered(ranks) if process not in named]
        offload = self._traced.arguments.hdp_offload != "off"
        members = [rank.member for rank in new if rank.member is not None]
        for event in name_events([rank.place for rank in new], offload, members):
            if event["pid"] not in named:
                self._events.append(event)

    def _about(self) -> dict[str, Any]:
        return _ABOUT | {"clock": clock(), "began_s": self._began_s}


def _name_of(epoch: int) -> str:
    return f"epoch {epoch}"


def _way_events(
    ways: Sequence[_Way], held: set[str], moments: dict[str, float], offset_s: float
) -> Iterator[Event]:
    """The bars of one way into an epoch: of the job, of its members, and of the lost ones."""
    told_s, ends_s = [], []
    for process, way in ((process_of(way.rank.member or 0), way) for way in ways):
        rank = way.rank
        shift_s = offset_s - moments[rank.clock]
        spans = list(rank.spans)
        if way.unwritten is not None and f"step {way.unwritten[0]}" not in held:
            spans += way.unwritten[1].spans
        for span in sorted(spans, key=lambda span: span.start_s):
            yield span_event(span, None, rank.place, process, shift_s)
        for span in way.recovery:
            yield span_event(span, None, rank.place, process, shift_s)
        ends_s.append(rank.started_s + shift_s)
        if way.before is not None:
            told_s.append(min(span.start_s for span in way.recovery) + shift_s)
    one = next((way for way in ways if way.before is not None), ways[0])
    start_s, end_s = min(told_s, default=min(ends_s)), max(ends_s)
    lost = sorted(set(one.before or ()) - set(one.members))
    joined = sorted(set(one.members) - set(one.before or one.members))
    about: dict[str, Any] = {"why": one.why, "behind_step": one.step}
    about |= {"members": one.members, "lost": lost, "joined": joined}
    thread = thread_of(JOB, RECOVERY)
    yield bar(_name_of(one.epoch), JOB, thread, start_s, end_s, about)
    for member in lost:
        process = process_of(member)
        yield bar("lost", process, thread_of(process, RECOVERY), start_s, end_s, {"why": one.why})

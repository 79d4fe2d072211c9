"""Traces a few steps of the job: what each rank did, and the plan laid over it.

Every rank records its spans, the first one writes them all as trace events.

A rank is a process of the trace (in a job whose ranks come and go: a member); its threads are the
plan, what it computed, each kind of wait, and the optimizer's step. With several model chunks on a
stage (virtual stages) plan and compute have a thread a chunk. A micro-batch in parts has a bar for
each part of it.
The plan's bars begin with the step and are stretched by one factor for the whole step, measured
over predicted compute of all ranks, so that its shape compares with what happened on any machine.

Times are seconds of the CPU's clock, to which a GPU's are tied. Ranks of one machine share it.
Those of different machines are aligned where they leave the step's agreement, an all-reduce that
nobody leaves before everybody has entered it: exact to a message's way between machines.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_hdp.megatron.parallel import RankPlace
from megatron_hdp.megatron.step import HdpSteps
from megatron_hdp.options import trace_steps
from megatron_hdp.planner import Evaluation, Plan
from megatron_hdp.runtime.timeline import (
    BACKWARD,
    ENCODER,
    FORWARD,
    OPTIMIZER,
    PIPELINE_WAIT,
    RING_WAIT,
    ROW_GRADIENTS_WAIT,
    ROWS_WAIT,
    SYNC,
    TO_DEVICE,
    TO_HOST,
    Span,
)
from megatron_hdp.simulator.plan_bars import bars_by_rank, lanes_of
from megatron_hdp.simulator.trace_events import Event, MicroBatchDetails, bar, labels, write_events

PLAN, COMPUTE = "plan", "compute"
RECOVERY = "recovery"
LANES = (PLAN, COMPUTE, TO_HOST, TO_DEVICE, RING_WAIT, PIPELINE_WAIT, SYNC, OPTIMIZER, RECOVERY)
_OF_CHUNKS = (PLAN, COMPUTE)
_COMPUTES = {FORWARD, BACKWARD}
_BETWEEN = {ENCODER, ROWS_WAIT, ROW_GRADIENTS_WAIT}
"""What stands among them."""
_THREADS = 1000  # numbers of one process, ten a chunk
JOB = 1  # the process above those of the ranks
_FIRST_RANK = 2
_ORDER = ("hdp_rank", "stage", "tensor_rank")
_SHORT = 1e-4  # of the step: shorter waits are too many to draw and too short to see

_BOOT = Path("/proc/sys/kernel/random/boot_id")
ABOUT = {
    "times": "when work ran: by CPU clocks; on GPUs by events of the compute stream, aligned "
    "with the CPU's clock at the beginning of each step",
    "alignment": "ranks of one machine share its clock; machines are aligned where they leave "
    "the all-reduce that begins a step",
    "plan": "its times are multiplied by measured / predicted compute of the step",
}


@dataclass(frozen=True)
class RankSpans:
    """What one rank noted in one step."""

    place: RankPlace
    clock: str
    """Ranks that name the same clock read the same one."""
    started_s: float
    """When it began, having left the step's agreement."""
    spans: list[Span]
    left_out_s: dict[str, float]
    """Seconds of waits too short to be among the spans, by kind."""
    cpu_s: float
    """CPU time of its process, all threads."""
    member: int | None = None
    """Its number in a job whose ranks come and go."""

    @classmethod
    def of_rank(
        cls, place: RankPlace, clock: str, started_s: float, spans: list[Span], cpu_s: float
    ) -> RankSpans:
        """Keeps of a step's spans what can be seen in a picture of it."""
        end_s = max((span.end_s for span in spans), default=started_s)
        least_s = _SHORT * (end_s - started_s)
        kept, left_out_s = [], defaultdict[str, float](float)
        for span in spans:
            duration_s = span.end_s - span.start_s
            if span.kind in _COMPUTES or duration_s >= least_s:
                kept.append(span)
            else:
                left_out_s[span.kind] += duration_s
        return cls(place, clock, started_s, kept, dict(left_out_s), cpu_s)

    @property
    def compute_s(self) -> float:
        """Seconds of forward and backward without the waits for other ranks inside them."""
        signs = {FORWARD: 1, BACKWARD: 1, RING_WAIT: -1, ROWS_WAIT: -1}
        drawn_s = sum((one.end_s - one.start_s) * signs.get(one.kind, 0) for one in self.spans)
        return drawn_s - sum(self.left_out_s.get(one, 0.0) for one in (RING_WAIT, ROWS_WAIT))


def clock_starts(ranks: Iterable[RankSpans]) -> dict[str, float]:
    """When the step began on each clock: when the first of its ranks left the agreement."""
    starts: dict[str, float] = {}
    for rank in ranks:
        starts[rank.clock] = min(rank.started_s, starts.get(rank.clock, rank.started_s))
    return starts


def process_of(number: int) -> int:
    """The trace's process of a rank or, where ranks come and go, of a member."""
    return _FIRST_RANK + number


def numbered(ranks: Sequence[RankSpans]) -> Iterator[tuple[int, RankSpans]]:
    """Ranks, in ascending order of their places, with their processes."""
    for i, rank in enumerate(ranks):
        yield process_of(i if rank.member is None else rank.member), rank


def name_events(
    places: Sequence[RankPlace], offload: bool = False, members: Sequence[int] | None = None
) -> Iterator[Event]:
    """The names of processes and threads; ranks that come and go are named as `members`."""
    yield from labels("process", JOB, thread_of(JOB, PLAN), "job", 0)
    yield from labels("thread", JOB, thread_of(JOB, PLAN), "steps", 0)
    if members is not None:
        yield from labels("thread", JOB, thread_of(JOB, RECOVERY), "epochs", 1)
    for number, place in zip(members or range(len(places)), places, strict=True):
        process = process_of(number)
        label = f"HDP rank {place.hdp_rank}" if members is None else f"member {number}"
        label += f", stage {place.stage}" if place.num_stages > 1 else ""
        label += f", tensor rank {place.tensor_rank}" if place.num_tensor_ranks > 1 else ""
        yield from labels("process", process, thread_of(process, PLAN), label, process)
        unused = {TO_HOST, TO_DEVICE} if not offload else set()
        unused |= {PIPELINE_WAIT} if place.num_stages == 1 else set()
        unused |= {RECOVERY} if members is None else set()
        chunks = range(place.num_model_chunks)
        lanes = [(lane, chunk) for chunk in chunks for lane in _OF_CHUNKS]
        lanes += [(lane, 0) for lane in LANES if lane not in {*_OF_CHUNKS, *unused}]
        for position, (lane, chunk) in enumerate(lanes):
            named = lane
            if lane in _OF_CHUNKS and len(chunks) > 1:
                named += f", chunk {chunk}"
            yield from labels("thread", process, thread_of(process, lane, chunk), named, position)


def step_events(
    ranks: Sequence[RankSpans],
    plan: Plan,
    evaluation: Evaluation,
    step: int,
    offset_s: float,
    learnt: Mapping[str, Any] | None = None,
) -> Iterator[Event]:
    """The bars of one step, which begins at an offset of the trace.

    `ranks` are in ascending order of their places. `learnt` is how the run had corrected the cost
    model that the step was planned by.
    """
    starts = clock_starts(ranks)
    facts = step_facts(ranks, evaluation)
    if learnt is not None:
        facts["cost_model_corrections"] = dict(learnt)
    overlay = _Overlay(plan, evaluation, facts["plan_stretched_by"], offset_s)
    last_s = max(
        (span.end_s - starts[rank.clock] for rank in ranks for span in rank.spans), default=0.0
    )
    yield bar(f"step {step}", JOB, thread_of(JOB, PLAN), offset_s, offset_s + last_s, facts)
    for process, rank in numbered(ranks):
        yield from overlay.events(rank.place, process)
        for span in sorted(rank.spans, key=lambda span: span.start_s):
            shift_s = offset_s - starts[rank.clock]
            yield span_event(span, overlay.details, rank.place, process, shift_s)


def step_facts(ranks: Sequence[RankSpans], evaluation: Evaluation) -> dict[str, Any]:
    """Figures of the step, the factor between measured and predicted compute among them."""
    measured_s = sum(rank.compute_s for rank in ranks)
    predicted_s = sum(float(evaluation.busy_s[rank.place.hdp_rank]) for rank in ranks)
    left_out_s = defaultdict[str, float](float)
    for rank in ranks:
        for kind, seconds in rank.left_out_s.items():
            left_out_s[kind] += seconds
    return {
        "plan_stretched_by": measured_s / predicted_s,
        "measured_compute_s": measured_s,
        "predicted_compute_s": predicted_s,
        "predicted_makespan_s": evaluation.makespan_s,
        "predicted_efficiency": evaluation.efficiency,
        "waits_too_short_to_draw_s": dict(left_out_s),
        "cpu_s": sum(rank.cpu_s for rank in ranks),
    }


class _Overlay:
    """The plan's bars, stretched and moved to where the step begins."""

    def __init__(self, plan: Plan, evaluation: Evaluation, scale: float, offset_s: float) -> None:
        self.details = MicroBatchDetails(plan)
        self._parts = plan.parts_of_each
        self._scale = scale
        self._offset_s = offset_s
        self._lanes = [lanes_of(plan, evaluation, s) for s in range(evaluation.pipeline_stages)]
        self._by_rank = [bars_by_rank(lanes, plan.num_ranks) for lanes in self._lanes]

    def events(self, place: RankPlace, process: int) -> Iterator[Event]:
        """The bars of one rank."""
        lanes, (bars, offsets) = self._lanes[place.stage], self._by_rank[place.stage]
        for i in bars[offsets[place.hdp_rank] : offsets[place.hdp_rank + 1]].tolist():
            about = self.details.of(int(lanes.micro_batch[i]), place.hdp_rank)
            if self._parts[lanes.micro_batch[i]] > 1:
                about = about | {"part": int(lanes.part[i])}
            kind = "micro-batch"
            if len(self._lanes) > 1:
                kind = BACKWARD if lanes.backward[i] else FORWARD
            start_s, end_s = float(lanes.start_s[i]), float(lanes.own_end_s[i])
            yield bar(
                _name(kind, about),
                process,
                thread_of(process, PLAN, int(lanes.chunk[i])),
                self._offset_s + start_s * self._scale,
                self._offset_s + end_s * self._scale,
                about | {"predicted_s": end_s - start_s, "stretched_by": self._scale},
            )


def _lane_of(kind: str) -> str:
    if kind in _COMPUTES | _BETWEEN:
        return COMPUTE
    return kind if kind in LANES else RECOVERY


def span_event(
    span: Span, details: MicroBatchDetails | None, place: RankPlace, process: int, shift_s: float
) -> Event:
    """The bar of a span; without details where the plan is not known any more."""
    computes = span.kind in _COMPUTES
    thread = thread_of(process, _lane_of(span.kind), span.chunk if computes else 0)
    name, about = span.kind, {}
    if computes:
        name = f"{span.kind}, padding"
    if span.micro_batch is not None and details is None:
        about, name = {"micro_batch": span.micro_batch}, f"{span.kind} {span.micro_batch}"
    elif span.micro_batch is not None and details is not None:
        about = details.of(span.micro_batch, place.hdp_rank)
        if span.part is not None:
            about = about | {"part": span.part}
        name = _name(span.kind, about)
    if place.num_model_chunks > 1 and (computes or span.kind == RING_WAIT):
        about = about | {"chunk": span.chunk}
    return bar(name, process, thread, span.start_s + shift_s, span.end_s + shift_s, about)


def thread_of(process: int, lane: str, chunk: int = 0) -> int:
    """The thread of a lane, another one for each: none is its process, which would be first."""
    return _THREADS * process + 10 * chunk + LANES.index(lane)


def _name(kind: str, about: dict[str, Any]) -> str:
    tokens = about["tokens"] + about.get("local_tokens", 0)
    part = f", part {about['part']}" if "part" in about else ""
    return f"{kind} {about['micro_batch']}{part}: degree {about['degree']}, {tokens:,} tokens"


class StepTracer:
    """Traces the steps of ``--hdp-trace-steps``; every rank of the job makes the same calls.

    The file ``steps-FIRST-LAST.json`` is whole after every traced step, with those so far.

    Raises:
        ValueError: the folder cannot be made.
    """

    def __init__(self, folder: Path, steps: str, traced: HdpSteps) -> None:
        self._path = folder / f"steps-{steps}.json"
        self._steps = trace_steps(steps)
        self._traced = traced
        self._events: list[Event] = []
        self._cpu_began_s = 0.0  # of this process
        self._began_s: float | None = None  # the first traced step, on the first rank's clock
        if dist.get_rank() == 0:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ValueError(
                    f"--hdp-trace {folder}: {error.strerror}: give a folder that can be made"
                ) from None

    def begin(self, step: int) -> None:
        """Call before a step runs."""
        if step in self._steps:
            self._traced.executor.timeline.start_recording()
            self._cpu_began_s = time.process_time()

    def end(self, step: int) -> None:
        """Call when it has run and has been timed: gathers from all ranks and writes."""
        if step not in self._steps:
            return
        mine = self._noted(step)
        first = dist.get_rank() == 0
        ranks: list[RankSpans] | None = [mine] * dist.get_world_size() if first else None
        dist.gather_object(mine, ranks)
        if ranks is not None:
            self._add(step, ranks)
            write_events(self._path, self._events, self._about())

    def _noted(self, step: int) -> RankSpans:
        """What this rank noted in a step that has ended."""
        cpu_s = time.process_time() - self._cpu_began_s
        timeline = self._traced.executor.timeline
        return RankSpans.of_rank(
            self._traced.place, clock(), timeline.started_s, timeline.stop_recording(), cpu_s
        )

    def _add(self, step: int, ranks: list[RankSpans]) -> None:
        start_s = clock_starts(ranks)[ranks[0].clock]
        ranks = by_place(ranks)
        if self._began_s is None:
            self._began_s = start_s
        self._name(ranks)
        plan, evaluation = self._traced.planned_times()
        offset_s, learnt = start_s - self._began_s, self._traced.corrections()
        self._events += step_events(ranks, plan, evaluation, step, offset_s, learnt)

    def _name(self, ranks: Sequence[RankSpans]) -> None:
        """Names the processes of ranks before their first bars."""
        if not self._events:
            offload = self._traced.arguments.hdp_offload != "off"
            self._events += name_events([rank.place for rank in ranks], offload)

    def _about(self) -> dict[str, Any]:
        """Facts on the whole file."""
        return dict(ABOUT)


def by_place(ranks: Iterable[RankSpans]) -> list[RankSpans]:
    """In the order in which a viewer lists them."""
    return sorted(ranks, key=lambda rank: attrgetter(*_ORDER)(rank.place))


def clock() -> str:
    """What this rank's clock is shared under: the machine's boot, where Linux tells it."""
    if _BOOT.exists():
        return _BOOT.read_text().strip()
    return f"rank {dist.get_rank()}"

"""Traces a few steps of the job: every rank records its spans, the first one writes them all."""

from __future__ import annotations

import time
from pathlib import Path

import torch.distributed as dist

from megatron_hdp.megatron.parallel import RankPlace
from megatron_hdp.megatron.step import HdpSteps
from megatron_hdp.options import trace_steps
from megatron_hdp.simulator.trace_events import Event, write_events
from megatron_hdp.training.step_trace import RankSpans, clock_starts, name_events, step_events

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_ABOUT = {
    "times": "when work ran: by CPU clocks; on GPUs by events of the compute stream, aligned "
    "with the CPU's clock at the beginning of each step",
    "alignment": "ranks of one machine share its clock; machines are aligned where they leave "
    "the all-reduce that begins a step",
    "plan": "its times are multiplied by measured / predicted compute of the step",
}


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
        cpu_s = time.process_time() - self._cpu_began_s
        timeline = self._traced.executor.timeline
        mine = RankSpans.of_rank(
            self._traced.place, _clock(), timeline.started_s, timeline.stop_recording(), cpu_s
        )
        first = dist.get_rank() == 0
        ranks: list[RankSpans] | None = [mine] * dist.get_world_size() if first else None
        dist.gather_object(mine, ranks)
        if ranks is not None:
            self._add(step, ranks)
            write_events(self._path, self._events, _ABOUT)

    def _add(self, step: int, ranks: list[RankSpans]) -> None:
        start_s = clock_starts(ranks)[ranks[0].clock]
        ranks = sorted(ranks, key=lambda rank: _order(rank.place))
        if self._began_s is None:
            self._began_s = start_s
            offload = self._traced.arguments.hdp_offload != "off"
            self._events += name_events([rank.place for rank in ranks], offload)
        plan, evaluation = self._traced.planned_times()
        offset_s, learnt = start_s - self._began_s, self._traced.corrections()
        self._events += step_events(ranks, plan, evaluation, step, offset_s, learnt)


def _order(place: RankPlace) -> tuple[int, int, int]:
    return place.hdp_rank, place.stage, place.tensor_rank


def _clock() -> str:
    """What this rank's clock is shared under: the machine's boot, where Linux tells it."""
    if _BOOT.exists():
        return _BOOT.read_text().strip()
    return f"rank {dist.get_rank()}"

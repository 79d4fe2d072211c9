"""What a run measured, step by step: its metrics, and where each rank's time went.

Read from ``metrics.jsonl`` (``--metrics-path``) and the trace of all steps (``--hdp-trace``).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_COMPUTE, _RING_WAIT, _SYNC, _OPTIMIZER = "compute", "ring wait", "gradient sync", "optimizer step"


@dataclass(frozen=True)
class Stretch:
    """Some time of one rank, in seconds since the step began."""

    start_s: float
    end_s: float
    degree: int = 1
    """Ranks that share the micro-batch."""

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class RankTime:
    """Where one rank's time went in a step."""

    compute: tuple[Stretch, ...]
    """Forwards and backwards, the waits for ring members inside them included."""
    waits: tuple[Stretch, ...]
    """For ring members, and in the end for the last rank; none overlaps another."""
    sync: tuple[Stretch, ...]
    """Gradients reduced, without waiting for the last rank; the optimizer's step."""


@dataclass(frozen=True)
class Step:
    """One step of a run."""

    metrics: dict[str, Any]
    """Of `megatron_hdp.training.metrics.StepMetrics`."""
    traced_s: float
    """From its first micro-batch to its end."""
    cpu_s: float
    """CPU time of all ranks together."""
    ranks: tuple[RankTime, ...]

    @property
    def number(self) -> int:
        """Counted from 1."""
        return int(self.metrics["step"])

    @property
    def seconds(self) -> float:
        """What it took."""
        return float(self.metrics["seconds"])

    @property
    def largest_degree(self) -> int:
        """Of its rings; the static mesh has no other."""
        return max((one.degree for rank in self.ranks for one in rank.compute), default=1)

    @property
    def waited_s(self) -> float:
        """Time that ranks waited for each other, all ranks together."""
        return sum(one.seconds for rank in self.ranks for one in rank.waits)


def read_run(folder: Path) -> list[Step]:
    """Return the steps of ``FOLDER/metrics.jsonl`` and of the only trace in ``FOLDER/trace``.

    Raises:
        ValueError: there is no step, or the trace is not one of the same steps.
    """
    path = folder / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    if not records:
        raise ValueError(f"{path}: found no step, expected one JSON object a line: run it again")
    traces = sorted((folder / "trace").glob("*.json"))
    if len(traces) != 1:
        raise ValueError(f"{folder / 'trace'}: found {len(traces)} traces, expected one")
    traced = _read_trace(traces[0])
    numbers = [record["step"] for record in records]
    if sorted(traced) != numbers:
        raise ValueError(f"{traces[0]}: found the steps {sorted(traced)}, expected {numbers}")
    return [Step(record, *traced[record["step"]]) for record in records]


def seconds_of(run: Sequence[Step]) -> float:
    """Return what all steps took."""
    return sum(step.seconds for step in run)


def cpu_s_of(run: Sequence[Step]) -> float:
    """Return the CPU time of all ranks in all steps."""
    return sum(step.cpu_s for step in run)


def wait_share(run: Sequence[Step]) -> float:
    """Return the share of the ranks' time, over all steps, that they waited for each other."""
    all_s = sum(step.traced_s * len(step.ranks) for step in run)
    return sum(step.waited_s for step in run) / all_s


def busy_share(run: Sequence[Step], cores: int) -> float:
    """Return the share of the time of the cores that ranks can use in which they used them."""
    return cpu_s_of(run) / (min(cores, len(run[0].ranks)) * seconds_of(run))


def speedup(static: Sequence[Step], hdp: Sequence[Step]) -> float:
    """Return how many times as fast HDP ran all steps.

    Both runs train on the same sequences in a step, so their times compare. A single step's ratio
    differs from run to run by more than that of all of them.
    """
    return seconds_of(static) / seconds_of(hdp)


def nearest_step(static: Sequence[Step], hdp: Sequence[Step]) -> int:
    """Return the place of the step whose speed-up is nearest to that of all."""
    of_all = speedup(static, hdp)
    away = [abs(a.seconds / b.seconds - of_all) for a, b in zip(static, hdp, strict=True)]
    return away.index(min(away))


def _read_trace(path: Path) -> dict[int, tuple[float, float, tuple[RankTime, ...]]]:
    """Return of every step its time, its CPU time and each rank's time."""
    events = json.loads(path.read_bytes())["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    missing = {_COMPUTE, _RING_WAIT, _SYNC, _OPTIMIZER, "steps"} - set(lanes.values())
    if missing:
        raise ValueError(f"{path}: found no lane {sorted(missing)}, expected a trace of a job")
    bars = [(lanes[e["tid"]], e) for e in events if e["ph"] == "X"]
    steps = {}
    for whole in (bar for lane, bar in bars if lane == "steps"):
        first, last = whole["ts"], whole["ts"] + whole["dur"]
        mine = [(lane, bar) for lane, bar in bars if first <= bar["ts"] <= last]
        ranks = _ranks(mine, first)
        steps[int(whole["name"].split()[1])] = whole["dur"] / 1e6, whole["args"]["cpu_s"], ranks
    return steps


def _ranks(bars: Sequence[tuple[str, dict[str, Any]]], first: float) -> tuple[RankTime, ...]:
    stretches: dict[int, dict[str, list[Stretch]]] = {}
    for lane, bar in bars:
        if lane in (_COMPUTE, _RING_WAIT, _SYNC, _OPTIMIZER):
            start_s, degree = (bar["ts"] - first) / 1e6, bar["args"].get("degree", 1)
            stretch = Stretch(start_s, start_s + bar["dur"] / 1e6, degree)
            stretches.setdefault(bar["pid"], {}).setdefault(lane, []).append(stretch)
    by_rank = [stretches[process] for process in sorted(stretches)]
    syncs = [rank[_SYNC][0].start_s for rank in by_rank if _SYNC in rank]
    return tuple(_rank_time(rank, max(syncs, default=0.0)) for rank in by_rank)


def _rank_time(lanes: dict[str, list[Stretch]], all_there_s: float) -> RankTime:
    """A rank's time; before `all_there_s` gradient sync is waiting for the last rank."""
    waits, sync = list(lanes.get(_RING_WAIT, ())), list(lanes.get(_OPTIMIZER, ()))
    for one in lanes.get(_SYNC, ()):
        if one.start_s < all_there_s:
            waits.append(Stretch(one.start_s, min(one.end_s, all_there_s)))
        if one.end_s > all_there_s:
            sync.append(Stretch(max(one.start_s, all_there_s), one.end_s))
    return RankTime(tuple(lanes.get(_COMPUTE, ())), tuple(waits), tuple(sync))

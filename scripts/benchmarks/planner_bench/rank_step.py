"""What one rank's Python does for a step and at the start of a job: milliseconds, and bytes held.

Nothing is communicated: groups are made by torch's fake backend, and what other ranks would send is
made here.
"""

import pickle
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import torch.distributed as dist
from planner_bench.cases import Case
from planner_bench.markdown import head, row
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_hdp.arrays import BoolArray, Int64Array
from megatron_hdp.cli.plan_outcomes import plan_with
from megatron_hdp.data.mixture import Position, Step
from megatron_hdp.data.steps import PlannedStep, RankShare, Reader, StepShares, StepTotals
from megatron_hdp.data.steps.micro_batch import RankMicroBatch, read_micro_batch
from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.options import parse_arguments
from megatron_hdp.planner import Plan
from megatron_hdp.runtime.health.diagnosis import Status
from megatron_hdp.runtime.ring import TokenLayout
from megatron_hdp.runtime.timeline import Timeline

T = TypeVar("T")

_RANK = 0
_FLAGS = (
    "--hybrid-data-parallel --num-layers 1 --hidden-size 64 --num-attention-heads 4 --seq-length "
    "8192 --hdp-tokens-per-rank 8192 --global-batch-size 1 --train-iters 1 --lr 1e-3 "
    "--attention-dropout 0 --hidden-dropout 0"
)


@dataclass(frozen=True)
class Part:
    """One thing that a rank does."""

    name: str
    seconds: float
    num_bytes: int
    """Held afterwards, or received."""


class _Zeros:
    """A source of tokens whose files are in memory."""

    def tokens(self, source: int, row: int, start: int, count: int) -> Int64Array:
        """Tokens."""
        return np.zeros(count, dtype=np.int64)

    def is_trained(self, source: int, row: int, start: int, stop: int) -> BoolArray:
        """All of them."""
        return np.ones(stop - start, dtype=np.bool_)


def parts_of(case: Case, seed: int, repeats: int) -> list[Part]:
    """What rank 0 does of a step, and at the start; medians of several times."""
    request = case.request(seed)
    parts: list[Part] = []

    def timed(name: str, act: Callable[[], T], size: Callable[[T], int], times: int = repeats) -> T:
        seconds = []
        for _ in range(times):
            started = time.perf_counter()
            found = act()
            seconds.append(time.perf_counter() - started)
        parts.append(Part(name, median(seconds), size(found)))
        return found

    def checked() -> int:
        made.validate(num_layers=request.cost_model.num_layers)
        return made.fingerprint()

    def share() -> RankShare:
        return StepShares(step, made).of([_RANK])[0]

    def read() -> list[RankMicroBatch]:
        return [read_micro_batch(mine, i, reader, _Zeros()) for i in range(mine.num_slots)]

    lengths = request.lengths
    made = timed("plan", lambda: plan_with("auto", request), _nbytes)
    timed("check and fingerprint of the plan", checked, lambda _: 8)
    step = _step(lengths)
    planned = PlannedStep(step, made)
    timed("sums of the step", lambda: StepTotals.of(planned, 1), lambda _: 500)
    mine = timed("the rank's share", share, _nbytes)
    reader = Reader(hdp_rank=_RANK, vocab_size=1)
    batches = timed("its tokens, without the files", read, lambda all: sum(map(_nbytes, all)))
    timed("its layouts and segments", lambda: [_layout(one) for one in batches], lambda _: 0)
    parts += _start(case.ranks)
    return parts


def _step(lengths: Int64Array) -> Step:
    zeros, ones = np.zeros(len(lengths), dtype=np.int64), lengths - 1
    return Step(
        *(zeros, np.arange(len(lengths)), zeros, lengths, ones, ones),
        *(Position(), Position(), int(lengths.max()), (1.0,)),
    )


def _layout(batch: RankMicroBatch) -> TokenLayout:
    ring = batch.ring
    found = TokenLayout(ring, ring.index(_RANK), batch.ring_slices, batch.local_lengths)
    _ = found.heads, found.causal_segments, found.half_segments, found.local_segments
    return found


def _start(num_ranks: int) -> list[Part]:
    """Groups, once a job; and what a rank reads that asks who has died."""
    arguments = parse_arguments(_FLAGS.split(), needs_data=False)
    received: list[int] = []

    def of_all(mine: Any) -> list[Any]:
        message = pickle.dumps(mine)
        received.append(len(message) * num_ranks)
        return [pickle.loads(message) for _ in range(num_ranks)]

    def new_group(ranks: Any = None, timeout: Any = None, *_: Any, **__: Any) -> Any:
        return made_by_torch(ranks, timeout, "fake")

    made_by_torch = dist.new_group
    with ExitStack() as patches:
        for target, name, value in (
            (dist, "new_group", new_group),
            (parallel, "gathered", of_all),
        ):
            patches.enter_context(mock.patch.object(target, name, value))
        dist.init_process_group("fake", store=FakeStore(), rank=_RANK, world_size=num_ranks)
        try:
            of_megatron = _seconds(partial(parallel.initialise, arguments))
            of_rings = _seconds(partial(parallel.new_ring_comm, arguments, Timeline()))
            parallel.finish()
        finally:
            dist.destroy_process_group()
    status = Status("node0123", 123, "forward of micro-batch 12", "wait, comm.py:43", True, 1.5)
    heard = [status.to_json().encode()] * num_ranks
    return [
        Part("start: Megatron's groups", of_megatron, 0),
        Part("start: the rings' group", of_rings, sum(received)),
        Part(
            "all heartbeats, once a rank waits long",
            _seconds(lambda: [Status.from_json(one) for one in heard]),
            sum(map(len, heard)),
        ),
    ]


def _seconds(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def _nbytes(of: Plan | RankShare | RankMicroBatch) -> int:
    return sum(one.nbytes for one in vars(of).values() if isinstance(one, np.ndarray))


def step_table(cases: Sequence[Case], found: Sequence[Sequence[Part]]) -> str:
    """Return one row for each part, two columns for each case."""
    names = [f"{case.name}: {unit}" for case in cases for unit in ("ms", "bytes")]
    lines = head(["what a rank does", *names])
    for same in zip(*found, strict=True):
        cells = [text for one in same for text in (f"{1e3 * one.seconds:.3g}", _size(one))]
        lines.append(row([same[0].name, *cells]))
    return "\n".join(lines)


def _size(part: Part) -> str:
    return f"{part.num_bytes:,}" if part.num_bytes else ""

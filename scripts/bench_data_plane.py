"""What the data plane's planner answers to a large job: seconds, and bytes of each message.

``python scripts/bench_data_plane.py --planner`` lets one `PlanningService` with a journal on disk
decide steps of made-up sources (log-normal lengths), and asks it for the shares of every node, as
the nodes' constructors do, from some threads at once. An answer is pickled with protocol 5, as Ray
does before it sends it; beside it stands what the arrays of the node's shares take.
"""

import argparse
import os
import pickle
import statistics
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron_hdp.data.mixture import BatchSize, Mixture, Position, Schedule
from megatron_hdp.data.mixture.draw import MixedSource
from megatron_hdp.data.mixture.stream import SourceStream
from megatron_hdp.data.order import SourceOrder
from megatron_hdp.data.shuffles import Feistel
from megatron_hdp.data.steps import PlanSettings, StepPlanner
from megatron_hdp.data_plane.roles import Journal, PlanningService
from megatron_hdp.planner import CostModel

_MAX_LENGTH = 65_536
_ROWS = 1_000_000
_NAMES = ("web", "code", "books", "chat", "maths")

Int64Array = npt.NDArray[np.int64]


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--planner", action="store_true", required=True, help="measure the planner's answers")
    add("--nodes", type=int, nargs="+", default=[64, 512], help="of the job (default: 64 and 512)")
    add("--ranks-per-node", type=int, default=8, help="(default: 8)")
    add("--sequences", type=int, default=60_000, help="of a step (default: 60,000)")
    add("--rounds", type=int, default=5, help="steps that are measured (default: 5)")
    add("--threads", type=int, default=16, help="that ask at once (default: 16)")
    options = parser.parse_args()
    print(
        f"answers to all nodes for a step of {options.sequences:,} sequences, "
        f"{options.threads} threads on {len(os.sched_getaffinity(0))} CPUs, median of "
        f"{options.rounds} steps (slowest)"
    )
    print(
        f"{'nodes':>6} {'ranks':>7} {'decided in':>20} {'all answered in':>20} {'CPU':>8} "
        f"{'largest message':>16} {'its shares':>11} {'all messages':>13}"
    )
    for num_nodes in options.nodes:
        print(_row(num_nodes, options), flush=True)


@dataclass(frozen=True)
class _Asked:
    """One step, asked for by all nodes."""

    decided_s: float
    answered_s: float
    cpu_s: float
    """Of all threads while they were answered."""
    largest_bytes: int
    of_shares_bytes: int
    all_bytes: int


def _row(num_nodes: int, options: argparse.Namespace) -> str:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.threads) as threads:
        num_ranks = num_nodes * options.ranks_per_node
        planner = _planner(num_ranks, options)
        service = PlanningService("train", planner, Journal(Path(folder)), steps_ahead=0)
        loaders = {name: tuple(f"{name}-{i}" for i in range(3)) for name in _NAMES}
        service.serve(loaders, dict.fromkeys(_NAMES, 2))
        nodes = [
            range(first, first + options.ranks_per_node)
            for first in range(0, num_ranks, options.ranks_per_node)
        ]
        found, position = [], Position()
        for _ in range(options.rounds):
            asked, position = _step(service, position, nodes, threads)
            found.append(asked)
        service.close()
    largest = max(found, key=lambda one: one.largest_bytes)
    return (
        f"{num_nodes:6,} {num_ranks:7,} {_cell([one.decided_s for one in found]):>20} "
        f"{_cell([one.answered_s for one in found]):>20} "
        f"{statistics.median([one.cpu_s for one in found]):6.2f} s {largest.largest_bytes:14,} B "
        f"{largest.of_shares_bytes:9,} B {max(one.all_bytes for one in found) / 1e6:10.1f} MB"
    )


def _step(
    service: PlanningService,
    position: Position,
    nodes: list[range],
    threads: ThreadPoolExecutor,
) -> tuple[_Asked, Position]:
    began = time.perf_counter()
    after = service.answer(position, [0]).totals.after  # drawn, planned and in the journal
    decided_s = time.perf_counter() - began
    cpu = time.process_time()
    sizes = list(threads.map(lambda ranks: _answered(service, position, ranks), nodes))
    answered_s = time.perf_counter() - began - decided_s
    largest, of_shares = max(sizes)
    total = sum(size for size, _ in sizes)
    cpu_s = time.process_time() - cpu
    return _Asked(decided_s, answered_s, cpu_s, largest, of_shares, total), after


def _answered(service: PlanningService, position: Position, ranks: range) -> tuple[int, int]:
    """Return the bytes of a message, and of the arrays of the shares in it."""
    answer = service.answer(position, ranks)
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(answer, protocol=5, buffer_callback=buffers.append)
    size = len(body) + sum(one.raw().nbytes for one in buffers)
    return size, sum(one.num_bytes for one in answer.shares)


def _cell(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} s ({max(seconds):.2f})"


def _planner(num_ranks: int, options: argparse.Namespace) -> StepPlanner:
    settings = PlanSettings(
        batch=BatchSize(sequences=options.sequences),
        seed=1,
        num_ranks=num_ranks,
        num_stages=1,
        lockstep_ranks=1,
        tokens_per_rank=_MAX_LENGTH,
        strategy="auto",
        max_length=_MAX_LENGTH,
        slice_multiple=1,
        offload="off",
        cost_model=CostModel(a=1e-12, b=1e-7, kv_bytes_per_token=1000),
    )
    return StepPlanner(_MadeUp(), settings)  # type: ignore[arg-type]


class _Rows:
    """Lengths of one source; every label is trained."""

    def __init__(self, key: int) -> None:
        drawn = np.random.default_rng(key).lognormal(7, 1, _ROWS)
        self._lengths = np.clip(drawn, 1, _MAX_LENGTH).astype(np.int64)
        self.num_rows = _ROWS

    def lengths(self, rows: Int64Array) -> Int64Array:
        return self._lengths[rows]

    def num_labels(self, rows: Int64Array, lengths: Int64Array) -> Int64Array:
        return lengths - 1

    def num_trained(self, rows: Int64Array, starts: Int64Array, stops: Int64Array) -> Int64Array:
        return stops - starts


class _MadeUp:
    """The part of a `Corpus` that drawing takes."""

    names = _NAMES
    sources = _NAMES

    def __init__(self) -> None:
        self._rows = [_Rows(key) for key in range(len(_NAMES))]

    def orders(self) -> dict[str, SourceOrder]:
        return {}

    def mixture(self, _: Mapping[str, SourceOrder], batch: BatchSize, seed: int) -> Mixture:
        mixed = [
            MixedSource(
                name,
                SourceStream(rows, Feistel(rows.num_rows, seed, key), splits_long=False),
                float(rows.lengths(np.arange(_ROWS)).mean()),
            )
            for key, (name, rows) in enumerate(zip(_NAMES, self._rows, strict=True))
        ]
        schedule = Schedule().resolved(dict.fromkeys(_NAMES, 1.0), _MAX_LENGTH)
        return Mixture(mixed, schedule, batch)


if __name__ == "__main__":
    main()

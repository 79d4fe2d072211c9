"""The planner of a large job: seconds until every node has heard its share of a step."""

import argparse
import pickle
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from plane_bench.common import environment, heading, planner_of, setup_of, table

from megatron_hdp.data.mixture import Position
from megatron_hdp.data.spec import LoadersSpec
from megatron_hdp.data_plane.records import to_plain
from megatron_hdp.data_plane.roles import Answer, Journal, PlanningService
from megatron_hdp.planner import LLAMA_7B

_GOAL_S = 1.0
_CONTEXT = 8192
_LOADERS = {"s0": ("loader-0",)}, {"s0": 1}
Ask = Callable[[Position], tuple[float, list[Answer]]]
"""All nodes ask for a step: seconds until the last has its answer, and the answers."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what `run` heeds."""
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--sequences", type=int, default=60_000)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--without-ray", action="store_true", help="only the planner itself")


def run(options: argparse.Namespace) -> int:
    """Measure; print a table; return 1 if the ways answer differently."""
    print(heading())
    nodes = [
        list(range(first, first + options.ranks_per_node))
        for first in range(0, options.ranks, options.ranks_per_node)
    ]
    with tempfile.TemporaryDirectory() as own:
        folder = Path(own)
        path = _made_up(folder, options.documents)
        setup = setup_of(
            path,
            ranks=options.ranks,
            sequences=options.sequences,
            loaders=LoadersSpec(backend="ray", steps_ahead=1),
            max_length=_CONTEXT,
            tokens_per_rank=_CONTEXT,
            cost_model=LLAMA_7B,
        )
        rows, found = [], []
        ways = [("in one process", _alone)] + [("an actor of Ray", _actor)] * (
            not options.without_ray
        )
        for name, way in ways:
            cells, answers = way(setup, folder / name.replace(" ", "-"), nodes, options.steps)
            rows.append([name, *cells])
            found.append(answers)
    print(
        f"{options.ranks:,} ranks on {len(nodes):,} nodes, {options.sequences:,} sequences a step, "
        f"median of {options.steps} steps; goal <= {_GOAL_S:.0f} s, messages <= their shares' bytes"
    )
    header = ["planner", "first step, planned when asked", "later, planned ahead"]
    header += ["CPU s of a later step", "largest message", "its share's arrays", "all messages"]
    print(table(header, rows))
    return 0 if all(one == found[0] for one in found) else 1


def _made_up(folder: Path, num_documents: int) -> Path:
    """Write an index of documents of log-normal lengths; no token of it is ever read."""
    lengths = np.random.default_rng(7).lognormal(6.0, 1.2, num_documents)
    lengths = np.clip(lengths, 2, _CONTEXT).astype(np.int64)
    prefix = folder / "source"
    with open(f"{prefix}.idx", "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + b"\x08")
        for count in (num_documents, num_documents + 1):
            file.write(count.to_bytes(8, "little"))
        lengths.astype("<i4").tofile(file)
        (2 * (np.cumsum(lengths) - lengths)).tofile(file)
        np.arange(num_documents + 1).tofile(file)
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(2 * int(lengths.sum()))
    path = folder / "data.yaml"
    path.write_text(f"sources:\n  s0: {{path: {prefix}}}\n")
    return path


def _alone(setup: Any, folder: Path, nodes: Sequence[Sequence[int]], steps: int) -> Any:
    planner = planner_of(setup)
    journal = Journal(folder)
    service = PlanningService("train", planner, journal, steps_ahead=setup.loaders.steps_ahead)
    service.serve(*_LOADERS)
    try:
        return _steps(
            lambda position: [service.answer(position, ranks) for ranks in nodes], nodes, steps
        )
    finally:
        service.close()


def _actor(setup: Any, folder: Path, nodes: Sequence[Sequence[int]], steps: int) -> Any:
    folder.mkdir()
    token = secrets.token_hex(32)
    with environment(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token, RAY_worker_niceness="0"):
        return _of_actor(setup, folder, nodes, steps)


def _of_actor(setup: Any, folder: Path, nodes: Sequence[Sequence[int]], steps: int) -> Any:
    import ray  # it reads the token when it is imported

    from megatron_hdp.data_plane.actors import start_planner
    from megatron_hdp.data_plane.names import NAMESPACE

    ray.init(num_cpus=2, namespace=NAMESPACE, include_dashboard=False, log_to_driver=False)
    try:
        actor = start_planner("bench", folder, 60.0)
        ray.get(actor.configure.remote(to_plain(setup)))
        ray.get(actor.serve.remote("train", *_LOADERS))
        pid = ray.get(actor.figures.remote())["pid"]

        def ask(position: Position) -> list[Answer]:
            record = position.to_record()
            return ray.get([actor.answer.remote("train", record, ranks) for ranks in nodes])

        return _steps(ask, nodes, steps, pid)
    finally:
        ray.shutdown()


def _steps(
    ask: Callable[[Position], list[Answer]],
    nodes: Sequence[Sequence[int]],
    steps: int,
    pid: int | None = None,
) -> tuple[list[str], list[Any]]:
    position, times, cpu, fingerprints = Position(), [], [], []
    for _ in range(steps + 1):
        cpu_before, began = _cpu_s(pid), time.perf_counter()
        answers = ask(position)
        times.append(time.perf_counter() - began)
        cpu.append(_cpu_s(pid) - cpu_before)
        position = answers[0].totals.after
        fingerprints.append([_arrays(one) for one in answers])
        time.sleep(3 * times[0])  # while ranks run the step, the next one is planned
    messages = [len(pickle.dumps(one, protocol=5)) for one in answers]
    largest = int(np.argmax(messages))
    share = sum(one.num_bytes for one in answers[largest].shares)
    cells = [f"{times[0]:.2f} s ({cpu[0]:.2f} CPU s)", f"{statistics.median(times[1:]):.2f} s"]
    cells += [f"{statistics.median(cpu[1:]):.2f}", f"{messages[largest]:,} B", f"{share:,} B"]
    return [*cells, f"{sum(messages) / 2**20:.1f} MB"], fingerprints


def _arrays(answer: Answer) -> tuple[Any, ...]:
    """Return what tells answers apart."""
    return tuple(
        (one.hdp_rank, one.indices.tobytes(), one.ids.tobytes(), one.rows.tobytes())
        for one in answer.shares
    )


def _cpu_s(pid: int | None) -> float:
    import psutil

    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)

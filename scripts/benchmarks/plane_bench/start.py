"""Seconds until a rank has its first step, with warm caches."""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from plane_bench.common import (
    VOCABULARY,
    environment,
    heading,
    running_plane,
    setup_of,
    table,
    write_sources,
)

from megatron_hdp.data.mixture import Position
from megatron_hdp.data.spec import LoadersSpec
from megatron_hdp.data.steps import Reader
from megatron_hdp.data_plane.loaders import RayLoaders

_GOAL_S = 3.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what `run` heeds."""
    parser.add_argument("--head-start", type=float, nargs="+", default=[0.0, 10.0], help="seconds")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sources", type=int, default=5)
    parser.add_argument("--documents", type=int, default=2000, help="of each source")


def run(options: argparse.Namespace) -> int:
    """Measure; print a table."""
    print(heading())
    found: dict[float, list[tuple[float, float]]] = {one: [] for one in options.head_start}
    with tempfile.TemporaryDirectory() as own, environment():
        path = write_sources(Path(own), options.sources, options.documents)
        loaders = LoadersSpec(backend="ray", max=1)
        setup = setup_of(path, ranks=1, sequences=100, loaders=loaders)
        for _ in range(options.rounds):
            for head_start_s in options.head_start:
                found[head_start_s].append(_first_step(setup, head_start_s))
    rows = [
        [
            f"{head_start_s:.0f} s",
            f"{statistics.median(asked for _, asked in times):.1f} s",
            f"<= {_GOAL_S:.0f} s",
            f"{statistics.median(started for started, _ in times):.1f} s",
            ", ".join(f"{asked:.1f}" for _, asked in times),
        ]
        for head_start_s, times in found.items()
    ]
    header = ["the host has run before", "first step, from when it is asked for", "goal"]
    print(table([*header, "from the host's start", "each"], rows))
    return 0


def _first_step(setup, head_start_s):  # type: ignore[no-untyped-def]
    """Seconds from the host's start, and from the question, until a rank has its step."""
    started = time.perf_counter()
    with running_plane(num_spares=len(setup.spec.sources)) as folder:
        loaders = RayLoaders(folder / "node.sock", setup, Reader(0, VOCABULARY))
        try:
            time.sleep(max(0.0, started + head_start_s - time.perf_counter()))
            asked = time.perf_counter()
            loaders.get(Position())
            now = time.perf_counter()
        finally:
            loaders.close()
    return now - started, now - asked

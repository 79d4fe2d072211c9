"""Loaders that are killed while they load: how long a step waits, and whether it stays the same."""

import argparse
import os
import random
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from plane_bench.common import (
    VOCABULARY,
    digest,
    heading,
    hooked,
    local_loaders,
    running_plane,
    setup_of,
    table,
    write_sources,
)
from plane_bench.hooks import TOKEN_US

from megatron_hdp.data.mixture import Position
from megatron_hdp.data.spec import LoadersSpec
from megatron_hdp.data.steps import Reader
from megatron_hdp.data_plane.loaders import RayLoaders
from megatron_hdp.data_plane.node_files import read_status
from megatron_hdp.data_plane.setup import SplitSetup


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what `run` heeds."""
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--sources", type=int, default=2)
    parser.add_argument("--documents", type=int, default=1000, help="of each source")
    parser.add_argument("--token-us", type=float, default=40.0, help="so that loading takes time")
    parser.add_argument("--seed", type=int, default=1)


def run(options: argparse.Namespace) -> int:
    """Measure; print a table; return 1 if a batch is not that of an undisturbed run."""
    print(heading(), "seed", options.seed)
    rows, all_same = [], True
    with tempfile.TemporaryDirectory() as own, hooked("take_time", **{TOKEN_US: options.token_us}):
        path = write_sources(Path(own), options.sources, options.documents)
        for shadows in (1, 0):
            loaders = LoadersSpec(backend="ray", max=1, shadows=shadows, steps_ahead=1)
            setup = setup_of(path, ranks=2, sequences=200, loaders=loaders)
            with running_plane() as folder:
                waits, undisturbed, is_same = _killed(setup, folder, options)
            all_same &= is_same
            seconds = statistics.median(undisturbed), statistics.median(waits), max(waits)
            batches = f"{len(waits)} kills: {'same' if is_same else 'DIFFERENT'}"
            rows.append([str(shadows), *(f"{one:.2f} s" for one in seconds), batches])
    header = ["standby loaders", "a step undisturbed", "with a kill, median", "longest", "batches"]
    print(table(header, rows))
    return 0 if all_same else 1


def _killed(
    setup: SplitSetup, folder: Path, options: argparse.Namespace
) -> tuple[list[float], list[float], bool]:
    """Waits of steps in which a loader was killed, of others, and whether all were right."""
    choice = random.Random(options.seed)
    readers = [Reader(rank, VOCABULARY) for rank in range(2)]
    local = [local_loaders(setup, one) for one in readers]
    remote = [RayLoaders(folder / "node.sock", setup, one) for one in readers]
    position, waits, undisturbed, is_same = Position(), [], [], True
    try:
        for number in range(2 * options.kills + 1):
            if number:
                _wait_until_all_serve(folder, setup)
            began = time.perf_counter()
            for one in remote:
                one.expect(position)
            is_killed = number % 2 == 1
            if is_killed:
                time.sleep(choice.uniform(0.0, 0.2))
                os.kill(
                    choice.choice(sorted(serving[0] for serving in _pids(folder))), signal.SIGKILL
                )
            steps = [one.get(position) for one in remote]
            taken = time.perf_counter() - began
            if number:  # the first one waits for the plane to start
                (waits if is_killed else undisturbed).append(taken)
            for step, reference in zip(steps, local, strict=True):
                is_same &= digest(step) == digest(reference.get(position))
            position = steps[0].totals.after
        return waits, undisturbed, is_same
    finally:
        for one in [*remote, *local]:
            one.close()


def _pids(folder: Path) -> list[list[Any]]:
    """Of each source's loaders, the one that serves first; None of one that is being started."""
    crews = (read_status(folder) or {}).get("sources", {}).get("train", {})
    return [[one.get("pid") for one in crew["loaders"]] for crew in crews.values()]


def _wait_until_all_serve(folder: Path, setup: SplitSetup) -> None:
    """Return when every loader that should be there is alive and has been seen by the host."""
    wanted = 1 + setup.loaders.shadows
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        crews = _pids(folder)
        if crews and all(
            len(pids) == wanted and all(pid and Path(f"/proc/{pid}").exists() for pid in pids)
            for pids in crews
        ):
            return
        time.sleep(0.1)
    raise TimeoutError("found too few loaders after 120 s, expected all that the data ask for")

"""Loaders that are killed while they load: how long a step waits, and whether it stays the same."""

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from plane_bench.common import (
    VOCABULARY,
    digest,
    environment,
    heading,
    hook,
    kill_loader,
    planner_of,
    running_plane,
    setup_of,
    table,
    wait_until_all_serve,
    write_sources,
)
from plane_bench.hooks import BURNS, TOKEN_US

from megatron_hdp.data.mixture import Position
from megatron_hdp.data.spec import LoadersSpec
from megatron_hdp.data.steps import LocalLoaders, Reader
from megatron_hdp.data_plane.loaders import RayLoaders
from megatron_hdp.data_plane.node_files import read_status


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
    header = ["standby loaders", "a step undisturbed", "with a kill, median", "longest"]
    print(table([*header, "takeovers by another loader", "batches"], []), flush=True)
    is_same = True
    with tempfile.TemporaryDirectory() as own:
        path = write_sources(Path(own), options.sources, options.documents)
        for shadows in (1, 0):
            loaders = LoadersSpec(backend="ray", max=1, shadows=shadows, steps_ahead=1)
            setup = setup_of(path, ranks=2, sequences=200, loaders=loaders)
            variables = {TOKEN_US: str(options.token_us), BURNS: "0"}
            with environment(**hook("take_time"), **variables), running_plane() as folder:
                waits, undisturbed, same, figures = _killed(setup, folder, options)
            is_same &= same
            cells = [
                str(shadows),
                f"{statistics.median(undisturbed):.2f} s",
                f"{statistics.median(waits):.2f} s",
                f"{max(waits):.2f} s",
                f"{figures['takeovers']}, at most {figures['longest_takeover_s']:.2f} s",
                f"{len(waits)} kills: {'same' if same else 'DIFFERENT'}",
            ]
            print("| " + " | ".join(cells) + " |", flush=True)
    return 0 if is_same else 1


def _killed(setup: Any, folder: Path, options: Any) -> Any:
    """Waits of steps in which a loader was killed, of others, and whether all were right."""
    choice = random.Random(options.seed)
    readers = [Reader(rank, VOCABULARY) for rank in range(2)]
    planner = planner_of(setup)
    local = [LocalLoaders(planner, one) for one in readers]
    remote = [RayLoaders(folder / "node.sock", setup, one) for one in readers]
    position, waits, undisturbed, same = Position(), [], [], True
    try:
        for step in range(2 * options.kills + 1):
            if step:
                wait_until_all_serve(folder, setup)
            began = time.perf_counter()
            for one in remote:
                one.expect(position)
            is_killed = step % 2 == 1
            if is_killed:
                time.sleep(choice.uniform(0.0, 0.2))
                kill_loader(folder, choice)
            steps = [one.get(position) for one in remote]
            taken = time.perf_counter() - began
            if step:  # the first one waits for the plane to start
                (waits if is_killed else undisturbed).append(taken)
            for one, reference in zip(steps, local, strict=True):
                same &= digest(one) == digest(reference.prepare(position))
            position = steps[0].totals.after
        time.sleep(1.0)  # until the status says it
        status = read_status(folder)
        assert status is not None
        return waits, undisturbed, same, status["constructor"]
    finally:
        for one in [*remote, *local]:
            one.close()

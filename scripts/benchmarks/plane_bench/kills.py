"""Training while processes of the plane are killed: the share of the time in which steps run."""

import argparse
import random
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plane_bench.common import (
    VOCABULARY,
    digest,
    environment,
    heading,
    hook,
    kill_one,
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

_RANKS = 2


@dataclass
class _Ran:
    """A run of one way, and what it gave."""

    steps: int
    elapsed_s: float
    waits_s: list[float]
    kills: list[str] = field(default_factory=list)
    is_same: bool = True


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what `run` heeds."""
    parser.add_argument("--seconds", type=float, default=90.0, help="of each run")
    parser.add_argument("--every", type=float, default=8.0, help="seconds between two kills, mean")
    parser.add_argument("--step", type=float, default=0.5, help="seconds that a step computes")
    parser.add_argument("--sources", type=int, default=2)
    parser.add_argument("--documents", type=int, default=1000, help="of each source")
    parser.add_argument("--token-us", type=float, default=10.0, help="so that loading takes time")
    parser.add_argument("--seed", type=int, default=1)


def run(options: argparse.Namespace) -> int:
    """Measure; print a table; return 1 if a batch is not that of an undisturbed run."""
    print(heading(), "seed", options.seed)
    rows, effective, is_same = [], {}, True
    ways = [("none", 1), ("loaders", 1), ("loaders", 0), ("any", 1), ("any", 0)]
    for what, shadows in ways:
        ran = _trained(what, shadows, options)
        share = ran.steps * options.step / ran.elapsed_s
        effective[what, shadows] = share
        is_same &= ran.is_same
        num_kills = len(ran.kills)
        lost_s = (ran.elapsed_s - ran.steps * options.step) / max(num_kills, 1)
        rows.append(
            [
                {"any": "loaders, planner, constructor"}.get(what, what),
                str(shadows),
                str(num_kills),
                f"{ran.steps} in {ran.elapsed_s:.0f} s",
                f"{share:.1%}",
                f"{lost_s:.2f} s" if num_kills else "-",
                f"{statistics.median(ran.waits_s):.3f} s, {max(ran.waits_s):.2f} s",
                "same" if ran.is_same else "DIFFERENT",
            ]
        )
    header = ["killed", "shadows", "kills", "steps", "effective training time", "lost a kill"]
    print(table([*header, "waits: median, longest", "batches"], rows))
    for what in ("loaders", "any"):
        gain = effective[what, 1] / effective[what, 0]
        print(f"{what}: effective training time with a shadow over that without: {gain:.3f} x")
    return 0 if is_same else 1


def _trained(what: str, shadows: int, options: Any) -> _Ran:
    """Steps of ranks that compute for a while after each, while something is killed."""
    loaders = LoadersSpec(backend="ray", max=1, shadows=shadows, steps_ahead=2)
    variables = {TOKEN_US: str(options.token_us), BURNS: "0"}
    with tempfile.TemporaryDirectory() as own, environment(**hook("take_time"), **variables):
        path = write_sources(Path(own), options.sources, options.documents)
        setup = setup_of(path, ranks=_RANKS, sequences=100, loaders=loaders)
        with running_plane(num_spares=options.sources * (1 + shadows)) as folder:
            return _disturbed(what, setup, folder, options)


def _disturbed(what: str, setup: Any, folder: Path, options: Any) -> _Ran:
    readers = [Reader(rank, VOCABULARY) for rank in range(_RANKS)]
    remote = [RayLoaders(folder / "node.sock", setup, one) for one in readers]
    position, digests, waits = Position(), [], []
    stop, kills = threading.Event(), []

    def kill() -> None:
        choice = random.Random(options.seed)
        while not stop.wait(choice.expovariate(1 / options.every)):
            kills.extend(kill_one(what, folder, choice))

    killer = threading.Thread(target=kill)
    try:
        for one in remote:
            one.expect(position)
        position = [one.get(position) for one in remote][0].totals.after
        wait_until_all_serve(folder, setup)
        began = time.perf_counter()
        if what != "none":
            killer.start()
        while time.perf_counter() - began < options.seconds:
            asked = time.perf_counter()
            steps = [one.get(position) for one in remote]
            waits.append(time.perf_counter() - asked)
            following = steps[0].totals.after
            for one in remote:
                one.expect(following)
            computed_until = time.perf_counter() + options.step
            digests.append((position, [digest(one) for one in steps]))
            time.sleep(max(0.0, computed_until - time.perf_counter()))
            position = following
        elapsed_s = time.perf_counter() - began
    finally:
        stop.set()
        if killer.is_alive():
            killer.join()
        for one in remote:
            one.close()
    found = _Ran(len(digests), elapsed_s, waits, kills)
    planner = planner_of(setup)
    for number, reader in enumerate(readers):
        local = LocalLoaders(planner, reader)
        found.is_same &= all(digest(local.prepare(at)) == of[number] for at, of in digests)
        local.close()
    return found

"""Memory of a node: sources whose readers hold state, loaded in the ranks or beside them."""

import argparse
import multiprocessing
import tempfile
from collections import Counter
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
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
from plane_bench.hooks import STATE_MB
from plane_bench.pictures import Pictures, digest_of_pictures, write_pictures

from megatron_hdp.data.mixture import Position
from megatron_hdp.data.spec import LoadersSpec
from megatron_hdp.data.steps import Reader
from megatron_hdp.data_plane.cluster.job_folder import PREFIX, SHARED_MEMORY
from megatron_hdp.data_plane.hooks import run_hook
from megatron_hdp.data_plane.loaders import RayLoaders
from megatron_hdp.data_plane.node_files import read_status
from megatron_hdp.data_plane.setup import SplitSetup

_GOAL = 4.0
_KINDS = ("ranks", "Loader", "Planner", "Constructor", "host", "keeper", "Ray", "steps in /dev/shm")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what `run` heeds."""
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--sources", type=int, default=5)
    parser.add_argument("--state-mb", type=float, default=150.0, help="of each source's reader")
    parser.add_argument("--documents", type=int, default=2000, help="of each source")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument(
        "--pictures", action="store_true", help="state is a part of a table of pictures"
    )
    parser.add_argument(
        "--sources-per-loader",
        type=int,
        nargs="+",
        default=[1, 5],
        help="of the plane; each is measured against the same ranks",
    )


def run(options: argparse.Namespace) -> int:
    """Measure; print a table; return 1 if steps differ."""
    print(heading())
    rows, is_same = [], True
    for ranks in options.ranks:
        base, local, expected = _measure(options, ranks, LoadersSpec())
        for together in options.sources_per_loader:
            spec = LoadersSpec(backend="ray", max=1, sources_per_loader=together)
            _, remote, found = _measure(options, ranks, spec)
            is_same &= found == expected
            ratio = local.total() / remote.total()
            rows.append(
                [
                    *(str(ranks), str(together)),
                    *(_mb(one) for one in (base, local.total(), remote.total())),
                    f"{ratio:.2f} (goal >= {_GOAL:.0f})",
                    *(_mb(remote[kind]) for kind in _KINDS),
                    "same" if found == expected else "DIFFERENT",
                ]
            )
    print("MB of PSS over all processes; state of a node:", options.sources * options.state_mb)
    header = ["ranks", "sources a loader", "ranks before loading", "in-process", "remote", "ratio"]
    print(table([*header, *(f"remote: {kind}" for kind in _KINDS), "steps"], rows))
    return 0 if is_same else 1


def _measure(
    options: argparse.Namespace, num_ranks: int, loaders: LoadersSpec
) -> tuple[int, Counter[str], list[list[str]]]:
    """PSS of the ranks before they load; PSS by kind of process; digests of steps by rank."""
    is_made_up = {STATE_MB: 0 if options.pictures else options.state_mb}
    with tempfile.TemporaryDirectory() as own, hooked("hold_state", **is_made_up):
        if options.pictures:
            path = write_pictures(Path(own), options.sources, options.documents, options.state_mb)
        else:
            path = write_sources(Path(own), options.sources, options.documents)
        setup = setup_of(path, ranks=num_ranks, sequences=40 * num_ranks, loaders=loaders)
        num_spares = len(loaders.crews(setup.spec.sources))
        is_local = loaders.backend == "local"
        with nullcontext() if is_local else running_plane(num_spares) as folder:
            return _loaded(setup, num_ranks, options.steps, folder)


def _loaded(
    setup: SplitSetup, num_ranks: int, steps: int, folder: Path | None
) -> tuple[int, Counter[str], list[list[str]]]:
    fresh = multiprocessing.get_context("spawn")  # without what this process has imported and read
    pipes, ranks = [], []
    for number in range(num_ranks):
        ours, theirs = fresh.Pipe()
        arguments = theirs, setup, Reader(number, VOCABULARY), folder, steps
        ranks.append(fresh.Process(target=_rank, args=arguments, daemon=True))
        ranks[-1].start()
        theirs.close()  # so that a rank that fails is heard of
        pipes.append(ours)
    for one in pipes:
        one.recv()
    base = sum(_pss(one.pid) for one in ranks)
    for one in pipes:
        one.send("load")
    digests = [one.recv() for one in pipes]
    sizes = Counter({"ranks": sum(_pss(one.pid) for one in ranks)})
    if folder is not None:
        status = read_status(folder)
        assert status is not None
        host = psutil.Process(status["pid"])
        for process in [host, *host.children(recursive=True)]:
            sizes["host" if process == host else _kind(process)] += _pss(process.pid)
        sizes["keeper"] = _pss(host.ppid())
        sizes["steps in /dev/shm"] = status["constructor"]["segment_bytes"]
    for pipe, rank in zip(pipes, ranks, strict=True):
        pipe.send("end")
        rank.join()
    return base, sizes, digests


def _rank(
    pipe: Connection, setup: SplitSetup, reader: Reader, folder: Path | None, num_steps: int
) -> None:
    """A rank without torch: loads steps, says their digests, and waits until it is measured."""
    run_hook()
    pipe.send("ready")
    pipe.recv()
    if folder is None:
        loaders = local_loaders(setup, reader)
    else:
        loaders = RayLoaders(folder / "node.sock", setup, reader)
    position, digests = Position(), []
    pictures, held = Pictures.of_split(setup), []
    for _ in range(num_steps):
        before, step = position, loaders.get(position)
        position = step.totals.after
        loaders.expect(position)
        digests.append(digest(step))
        if pictures is not None:
            mine = pictures.of(step)[reader.hdp_rank :: setup.settings.num_ranks]
            held = loaders.decode(before, mine)  # until the next step's are there, as a rank does
            digests[-1] += digest_of_pictures(held)
    pipe.send(digests)
    pipe.recv()
    loaders.close()


def _kind(process: psutil.Process) -> str:
    name = (process.cmdline() or [""])[0].removeprefix("ray::").split(".")[0].split(" ")[0]
    return name if name in _KINDS else "Ray"


def _pss(pid: int | None) -> int:
    """Bytes of a process, pages that several share by parts; steps are counted by themselves."""
    maps = psutil.Process(pid).memory_maps()
    return sum(one.pss for one in maps if not one.path.startswith(f"{SHARED_MEMORY}/{PREFIX}"))


def _mb(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.0f}"

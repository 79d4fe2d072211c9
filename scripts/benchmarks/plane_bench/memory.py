"""Memory of a node: sources whose readers hold state, loaded in the ranks or beside them."""

import argparse
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import psutil
from plane_bench.common import (
    VOCABULARY,
    environment,
    heading,
    hook,
    rank_processes,
    running_plane,
    setup_of,
    table,
    write_sources,
)
from plane_bench.hooks import STATE_MB

from megatron_hdp.data.spec import LoadersSpec
from megatron_hdp.data.steps import Reader
from megatron_hdp.data_plane.node_files import read_status

_MB = 2**20
_GOAL = 4.0
_OURS = ("Planner", "Loader", "Constructor")
Sizes = Counter[str]
"""Bytes by kind of process."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what `run` heeds."""
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--sources", type=int, default=5)
    parser.add_argument("--state-mb", type=float, default=150.0, help="of each source's reader")
    parser.add_argument("--documents", type=int, default=2000, help="of each source")
    parser.add_argument("--steps", type=int, default=6)


def run(options: argparse.Namespace) -> int:
    """Measure; print tables; return 1 if steps differ."""
    print(heading())
    rows, kinds = [], []
    is_same = True
    for ranks in options.ranks:
        local, local_rss, bases, expected = _measure(options, ranks, "local")
        remote, remote_rss, _, found = _measure(options, ranks, "ray")
        is_same &= found == expected
        ratio = local.total() / remote.total()
        added = (local.total() - bases) / max(remote.total() - bases, 1)
        rows.append(
            [
                str(ranks),
                *(_mb(one) for one in (bases, local.total(), remote.total())),
                f"{ratio:.2f} (goal >= {_GOAL:.0f})",
                f"{added:.2f}",
                f"{_mb(local_rss)} and {_mb(remote_rss)}",
                "same" if found == expected else "DIFFERENT",
            ]
        )
        kinds.append((ranks, remote))
    header = ["ranks", "ranks before loading", "in-process", "remote", "ratio"]
    header += ["ratio above the ranks", "RSS", "steps"]
    print("MB of PSS over all processes; state of a node:", options.sources * options.state_mb)
    print(table(header, rows))
    names = sorted({name for _, sizes in kinds for name in sizes})
    print("MB of PSS of the remote way, by kind of process (how many):")
    print(
        table(
            ["ranks", *names],
            [[str(ranks), *(_mb(sizes[name]) for name in names)] for ranks, sizes in kinds],
        )
    )
    return 0 if is_same else 1


def _measure(
    options: argparse.Namespace, ranks: int, way: str
) -> tuple[Sizes, int, int, list[list[str]]]:
    """PSS by kind, RSS, PSS of the ranks before they load, and digests by rank."""
    loaders = LoadersSpec(backend=way, steps_ahead=2, max=1)
    with tempfile.TemporaryDirectory() as own:
        path = write_sources(Path(own), options.sources, options.documents)
        with environment(**hook("hold_state"), **{STATE_MB: str(options.state_mb)}):
            setup = setup_of(path, ranks=ranks, sequences=40 * ranks, loaders=loaders)
            if way == "local":
                return _loaded(options, setup, ranks, None)
            with running_plane(num_spares=len(setup.spec.sources)) as folder:
                return _loaded(options, setup, ranks, folder)


def _loaded(options, setup, ranks, folder):  # type: ignore[no-untyped-def]
    readers = [Reader(rank, VOCABULARY) for rank in range(ranks)]
    socket = None if folder is None else folder / "node.sock"
    with rank_processes(setup, readers, socket, steps=options.steps) as processes:
        for one in processes:
            one.said()
        bases = sum(_pss(one.pid) for one in processes)
        for one in processes:
            one.go_on()
        digests = [one.said()["digests"] for one in processes]
        sizes: Sizes = Counter({"ranks": sum(_pss(one.pid) for one in processes)})
        rss = sum(psutil.Process(one.pid).memory_info().rss for one in processes)
        if folder is not None:
            status = read_status(folder)
            assert status is not None
            host = psutil.Process(status["pid"])
            for process in [host, *host.children(recursive=True)]:
                sizes[_kind(process)] += _pss(process.pid)
                rss += process.memory_info().rss
            sizes["steps in /dev/shm"] = status["constructor"]["segment_bytes"]
        return sizes, rss, bases, digests


def _kind(process: psutil.Process) -> str:
    words = process.cmdline()
    if not words:
        return process.name()
    if words[0].startswith("ray::"):
        name = words[0].removeprefix("ray::").split(".")[0].split(" ")[0]
        return name if name in _OURS else f"ray worker {name}"
    if "megatron_hdp.data_plane.host" in words:
        return "host"
    for name in _named(words):
        return name
    return Path(words[0]).name


def _named(words: Iterable[str]) -> Iterable[str]:
    known = {
        "gcs_server": "ray gcs",
        "raylet/raylet": "ray raylet",
        "dashboard/agent.py": "ray dashboard agent",
        "runtime_env/agent": "ray runtime env agent",
        "default_worker.py": "ray worker IDLE",
        "cluster/start_node": "ray start",
        "client.server": "ray client server",
        "dashboard/dashboard.py": "ray web server",
    }
    first = " ".join(list(words)[:4])
    return [name for part, name in known.items() if part in first]


def _pss(pid: int) -> int:
    """Bytes of a process, pages that several share by parts."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/{pid}/smaps_rollup has no line of Pss")


def _mb(num_bytes: float) -> str:
    return f"{num_bytes / _MB:.0f}"

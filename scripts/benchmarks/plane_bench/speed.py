"""Pictures a second, from loaders of one source each and from loaders that sources share."""

import argparse
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from plane_bench.common import VOCABULARY, heading, running_plane, setup_of, table
from plane_bench.pictures import Pictures, digest_of_pictures, write_pictures

from megatron_hdp.data.mixture import Position
from megatron_hdp.data.spec import LoadersSpec
from megatron_hdp.data.steps import Reader
from megatron_hdp.data_plane.loaders import RayLoaders
from megatron_hdp.data_plane.node_files import read_status


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what `run` heeds."""
    parser.add_argument("--sources", type=int, default=5)
    parser.add_argument("--documents", type=int, default=500, help="of each source")
    parser.add_argument("--part-mb", type=float, default=50.0, help="a source's part of a table")
    parser.add_argument("--steps", type=int, default=6, help="of each kind of loaders, in turn")
    parser.add_argument("--sources-per-loader", type=int, nargs="+", default=[1, 5])


def run(options: argparse.Namespace) -> int:
    """Measure; print a table; return 1 if pictures differ."""
    print(heading())
    taken: dict[int, list[_Taken]] = {one: [] for one in options.sources_per_loader}
    with tempfile.TemporaryDirectory() as own, ExitStack() as stack:
        path = write_pictures(Path(own), options.sources, options.documents, options.part_mb)
        spec = LoadersSpec(backend="ray", max=1)
        setup = setup_of(path, ranks=1, sequences=200, loaders=spec)
        pictures = Pictures.of_split(setup)
        assert pictures is not None
        planes = {}
        for together in taken:
            folder = stack.enter_context(running_plane())
            its = replace(setup, loaders=replace(spec, sources_per_loader=together))
            loaders = RayLoaders(folder / "node.sock", its, Reader(0, VOCABULARY))
            stack.callback(loaders.close)
            planes[together] = loaders, folder
        position = Position()
        for number in range(options.steps + 1):
            for together, (loaders, folder) in planes.items():
                one = _Taken.of(loaders, folder, position, pictures)
                if number:  # the first reads the tables
                    taken[together].append(one)
            position = one.after
    digests = [[one.digest for one in its] for its in taken.values()]
    is_same = all(one == digests[0] for one in digests)
    rows = [
        [
            str(together),
            f"{statistics.median(one.count / one.seconds for one in its):.0f}",
            f"{statistics.median(1e3 * one.cpu_s / one.count for one in its):.2f} ms",
            f"{statistics.median(one.cpu_s / one.seconds for one in its):.2f}",
            "same" if is_same else "DIFFERENT",
        ]
        for together, its in taken.items()
    ]
    print(f"medians of {options.steps} steps of {one.count} pictures, of each kind in turn")
    header = ["sources a loader", "pictures a second", "loaders' CPU time a picture", "cores used"]
    print(table([*header, "pictures"], rows))
    return 0 if is_same else 1


@dataclass(frozen=True)
class _Taken:
    """A step's pictures, and what they took."""

    count: int
    seconds: float
    cpu_s: float
    """Of all loaders."""
    digest: str
    after: Position

    @classmethod
    def of(
        cls, loaders: RayLoaders, folder: Path, position: Position, pictures: Pictures
    ) -> "_Taken":
        step = loaders.get(position)
        wanted = pictures.of(step)
        before, began = _cpu_s(folder), time.perf_counter()
        found = loaders.decode(position, wanted)
        seconds = time.perf_counter() - began
        cpu_s = _cpu_s(folder) - before
        return cls(len(wanted), seconds, cpu_s, digest_of_pictures(found), step.totals.after)


def _cpu_s(folder: Path) -> float:
    crews = (read_status(folder) or {}).get("sources", {}).get("train", {})
    pids = {one["pid"] for crew in crews.values() for one in crew["loaders"] if one}
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(one.user + one.system for one in times)

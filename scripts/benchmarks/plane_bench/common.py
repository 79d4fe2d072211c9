"""What the measurements share: made-up sources, a plane on this machine, ranks, tables."""

import hashlib
import importlib.metadata
import json
import os
import platform
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_hdp.data import TokenWriter
from megatron_hdp.data.mixture import BatchSize, Opening, open_corpus, read_data_file
from megatron_hdp.data.spec import LoadersSpec
from megatron_hdp.data.steps import PlanSettings, RankStep, Reader, StepPlanner
from megatron_hdp.data_plane.hooks import VARIABLE
from megatron_hdp.data_plane.node_files import read_status
from megatron_hdp.data_plane.records import to_plain
from megatron_hdp.data_plane.setup import SplitSetup
from megatron_hdp.data_plane.starting import PlanePlace, node_of_plane
from megatron_hdp.planner import CostModel

VOCABULARY = 50_000
MAX_LENGTH = 2048
_SCRIPTS = Path(__file__).parents[1]
_RANK = Path(__file__).parent / "rank.py"


def heading() -> str:
    """Return a line: machine, load and versions."""
    versions = " ".join(f"{name} {importlib.metadata.version(name)}" for name in ("ray", "numpy"))
    load = " ".join(f"{one:.0f}" for one in os.getloadavg())
    return (
        f"{len(os.sched_getaffinity(0))} CPUs ({platform.machine()}), load {load}, "
        f"Python {platform.python_version()}, {versions}"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_sources(
    folder: Path, num_sources: int, num_documents: int, vocabulary: int = VOCABULARY
) -> Path:
    """Write sources of random tokens and the file that names them; return the file's path."""
    lines = ["sources:"]
    for number in range(num_sources):
        rng = np.random.default_rng(number)
        lengths = np.clip(rng.lognormal(5.0, 1.2, num_documents), 2, MAX_LENGTH)
        with TokenWriter(folder / f"source-{number}", vocabulary) as writer:
            for length in lengths.astype(np.int64).tolist():
                writer.add(rng.integers(0, vocabulary, length))
        lines.append(f"  s{number}: {{path: {folder / f'source-{number}'}}}")
    path = folder / "data.yaml"
    path.write_text("\n".join([*lines, ""]))
    return path


def setup_of(
    path: Path, *, ranks: int, sequences: int, loaders: LoadersSpec, **settings: Any
) -> SplitSetup:
    """Return the training split of a file of --hdp-data, its caches warm.

    Args:
        path: of the file.
        ranks: HDP ranks.
        sequences: of a step.
        loaders: who loads.
        settings: other fields of `PlanSettings`.
    """
    folder = path.parent / "caches"
    spec = read_data_file(path).training
    opening = Opening(
        max_length=MAX_LENGTH, long_sequence="truncate", tokenizer=None, cache_folder=folder
    )
    corpus = open_corpus(spec, replace(opening, say=lambda text: None))
    defaults: dict[str, Any] = {
        "batch": BatchSize(sequences=sequences),
        "seed": 1,
        "num_ranks": ranks,
        "num_stages": 1,
        "lockstep_ranks": 1,
        "tokens_per_rank": MAX_LENGTH,
        "strategy": "auto",
        "max_length": MAX_LENGTH,
        "slice_multiple": 1,
        "offload": "off",
        "cost_model": CostModel(a=2e-8, b=2.5e-5, kv_bytes_per_token=1000),
    }
    return SplitSetup(
        split="train",
        spec=spec,
        max_length=MAX_LENGTH,
        long_sequence="truncate",
        tokenizer=None,
        cache_folder=str(folder),
        settings=PlanSettings(**(defaults | settings)),
        orders=corpus.orders(),
        loaders=loaders,
    )


def digest(step: RankStep) -> str:
    """Return a fingerprint of all that a rank gets of a step, but for what planning took."""
    found = hashlib.blake2b(digest_size=8)
    found.update(repr(replace(step.totals, planning_ms=0.0)).encode())
    for part in (step.share, *step.micro_batches):
        for one in fields(part):
            value = getattr(part, one.name)
            found.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
    return found.hexdigest()


def planner_of(setup: SplitSetup) -> StepPlanner:
    """Return what draws and plans a split, in this process."""
    return setup.planner(lambda text: None, lambda source: source)


@contextmanager
def environment(**changes: str) -> Iterator[None]:
    """These variables, and this folder's modules for processes that are started, in the block."""
    path = os.pathsep.join(filter(None, [str(_SCRIPTS), os.environ.get("PYTHONPATH", "")]))
    wanted = {"PYTHONPATH": path, **changes}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def running_plane(num_spares: int = 0, timeout_s: float = 120.0) -> Iterator[Path]:
    """A data plane of one node on this machine; yields the node's folder.

    Args:
        num_spares: loaders that it starts before it is asked, as a job does.
        timeout_s: within which planner and loaders must answer.
    """
    with node_of_plane(PlanePlace.make("127.0.0.1", 1), 0, timeout_s, num_spares) as folder:
        try:
            yield folder
        except BaseException:
            print((folder / "log").read_text()[-4000:], file=sys.stderr)
            raise


def wait_until_all_serve(folder: Path, setup: SplitSetup) -> None:
    """Return when every loader that should be there is alive and has been seen by the host."""
    wanted = 1 + setup.loaders.shadows
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        crews = (read_status(folder) or {}).get("sources", {}).get("train", {})
        pids = [[one.get("pid") for one in crew["loaders"]] for crew in crews.values()]
        if pids and all(
            len(some) == wanted and all(pid and Path(f"/proc/{pid}").exists() for pid in some)
            for some in pids
        ):
            return
        time.sleep(0.1)
    raise TimeoutError("found too few loaders after 120 s, expected all that the data ask for")


def kill_loader(folder: Path, choice: random.Random) -> None:
    """Kill a loader that serves.

    Raises:
        RuntimeError: the node's status knows none.
    """
    crews = (read_status(folder) or {}).get("sources", {}).get("train", {})
    pids = [one["loaders"][0]["pid"] for one in crews.values() if "pid" in one["loaders"][0]]
    if not pids:
        raise RuntimeError("found no loader to kill, expected all to live")
    os.kill(choice.choice(sorted(pids)), signal.SIGKILL)


def hook(name: str) -> dict[str, str]:
    """Return the variable by which processes that read data call a function of `hooks`."""
    return {VARIABLE: f"plane_bench.hooks:{name}"}


class RankProcess:
    """One rank, without torch: a process that asks for steps and says what it waited."""

    def __init__(self, setup: SplitSetup, reader: Reader, socket: Path | None, **work: Any) -> None:
        """Start it.

        Args:
            setup: of the split.
            reader: what it reads.
            socket: of its node's constructor; None: it loads for itself.
            work: ``steps`` to ask for, ``pause_s`` after each.
        """
        told = {
            "setup": to_plain(setup),
            "reader": to_plain(reader),
            "socket": None if socket is None else str(socket),
            **work,
        }
        self._process = subprocess.Popen(
            [sys.executable, str(_RANK), json.dumps(told)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid

    def said(self) -> dict[str, Any]:
        """Return what it says next."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a rank ended with {self._process.wait()} before it said anything")
        found: dict[str, Any] = json.loads(line)
        return found

    def go_on(self) -> None:
        """Let it do what comes next."""
        assert self._process.stdin is not None
        print("now", file=self._process.stdin, flush=True)

    def end(self) -> None:
        """Wait until it has ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextmanager
def rank_processes(
    setup: SplitSetup, readers: Sequence[Reader], socket: Path | None, **work: Any
) -> Iterator[list[RankProcess]]:
    """Ranks that have imported what they need and wait; they have ended after the block."""
    with ExitStack() as stack:
        ranks = []
        for reader in readers:
            ranks.append(RankProcess(setup, reader, socket, **work))
            stack.callback(ranks[-1].end)
        yield ranks

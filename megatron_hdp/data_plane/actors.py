"""The roles as Ray actors. Arguments are small: what they need lies in the plane's folder.

Ray starts each again when its process dies; none keeps what a step depends on.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megatron_hdp.arrays import Int64Array
from megatron_hdp.data.media import Decoded
from megatron_hdp.data.mixture import Position, Source, TextSource
from megatron_hdp.data_plane.asker import Asker, NotOpenError, late
from megatron_hdp.data_plane.hooks import run_hook
from megatron_hdp.data_plane.names import (
    CONTROL,
    NAMESPACE,
    constructor_of,
    loader_of,
    planner_of,
    spare_of,
)
from megatron_hdp.data_plane.node_files import write_own
from megatron_hdp.data_plane.node_service import NodeService
from megatron_hdp.data_plane.records import from_plain, to_plain
from megatron_hdp.data_plane.roles import (
    Answer,
    Journal,
    Loaded,
    LoadingService,
    PlanningService,
    PublishedSource,
    Wanted,
    WantedItems,
)
from megatron_hdp.data_plane.setup import SplitSetup
from megatron_hdp.data_plane.starting import SOCKET
from megatron_hdp.data_plane.wire import NodeServer, SegmentFolder

_THREADS = 16
_PAUSE_S = 0.05
_say = partial(print, flush=True)


class Planner:
    """The one planner of a job; what does not wait is called in the concurrency group `CONTROL`."""

    def __init__(self, folder: str, timeout_s: float) -> None:
        """Take over: a planner that was there before cannot answer any more.

        Args:
            folder: of the plane; holds the journal, and the splits' setups after a restart.
            timeout_s: within which loaders must say how long rows are.
        """
        run_hook()
        self._folder = Path(folder)
        self._asker = Asker(timeout_s)
        self._askers = ThreadPoolExecutor(_THREADS, thread_name_prefix="ask")
        self._drawers = ThreadPoolExecutor(_THREADS, thread_name_prefix="draw")
        self._journal = Journal(self._folder / "journal")
        self._lock = threading.Lock()
        self._setups: dict[str, SplitSetup] = {}
        self._services: dict[str, PlanningService] = {}
        self._serving: dict[str, tuple[Mapping[str, tuple[str, ...]], Mapping[str, int]]] = {}
        for path in sorted(self._folder.glob("setup-*.json")):
            self._open(from_plain(SplitSetup, orjson.loads(path.read_bytes())))

    def configure(self, plain: Mapping[str, Any]) -> None:
        """Open a split, unless that is done."""
        setup = from_plain(SplitSetup, plain)
        with self._lock:
            if self._setups.get(setup.split) == setup:
                return
            path = self._folder / f"setup-{setup.split}.json"
            self._open(setup)
            write_own(path, orjson.dumps(plain))

    def setups(self) -> dict[str, Any]:
        """Return the splits' setups as plain values."""
        return {name: to_plain(one) for name, one in self._setups.items()}

    def serve(
        self, split: str, loaders: Mapping[str, tuple[str, ...]], num_serving: Mapping[str, int]
    ) -> None:
        """Tell who serves a split's sources."""
        self._serving[split] = loaders, num_serving
        self._services[split].serve(loaders, num_serving)

    def answer(self, split: str, position: Mapping[str, Any], ranks: Sequence[int]) -> Answer:
        """Return the shares of some ranks; see `PlanningService.answer`."""
        return self._services[split].answer(Position.from_record(position), ranks)

    def go_on_without(self, split: str, source: str, why: str) -> None:
        """Draw nothing more of a source that has failed; see `PlanningService.go_on_without`."""
        self._services[split].go_on_without(source, why)

    def figures(self) -> dict[str, Any]:
        """Return what is known of it, for `megatron-hdp data top`."""
        ahead = {name: one.num_ahead for name, one in self._services.items()}
        return {
            "epoch": self._journal.epoch,
            "steps_ahead": ahead,
            "failed": {name: one.failed for name, one in self._services.items()},
            "pid": os.getpid(),
        }

    def _open(self, setup: SplitSetup) -> None:
        service = PlanningService(
            setup.split,
            setup.planner(_say, partial(self._published, setup.split), self._drawers.map),
            self._journal,
            steps_ahead=setup.loaders.steps_ahead,
        )
        if setup.split in self._services:
            self._services[setup.split].close()
        if setup.split in self._serving:
            service.serve(*self._serving[setup.split])
        self._setups[setup.split], self._services[setup.split] = setup, service

    def _published(self, split: str, source: Source) -> Source:
        if not isinstance(source, TextSource):
            return source  # its table is shared by all processes of a node
        name = source.name

        def num_serving() -> int:
            return self._crew(split)[1][name]

        def ask(turn: int, method: str, arguments: Sequence[Any]) -> Any:
            loaders = self._crew(split)[0][name]
            turn %= len(loaders)
            order = (*loaders[turn:], *loaders[:turn])
            return self._asker.ask_any(name, order, method, arguments)

        return PublishedSource.of(source, ask, num_serving, self._askers)

    def _crew(self, split: str) -> tuple[Mapping[str, tuple[str, ...]], Mapping[str, int]]:
        """Who serves a split, once the supervisor has said it."""
        deadline = time.monotonic() + self._asker.timeout_s
        while split not in self._serving:
            if time.monotonic() > deadline:
                raise late(
                    f"split {split}: found no loaders after {self._asker.timeout_s:.0f} s, "
                    "expected some"
                )
            time.sleep(_PAUSE_S)
        return self._serving[split]


class Loader:
    """One loader of one source or of several; a spare is told later of which."""

    def __init__(self, setup: bytes | None = None, sources: Sequence[str] = ()) -> None:
        """Open the sources, if they are known.

        Args:
            setup: of the split, as JSON.
            sources: names of the sources.
        """
        run_hook()
        self._lock = threading.Lock()
        self._services: dict[str, LoadingService] = {}
        self._failure: Exception | None = None
        if setup is not None:
            self.open(setup, sources)

    def open(self, setup: bytes, sources: Sequence[str]) -> None:
        """Open sources, unless that is done; whoever asks for rows hears why it failed.

        Raises:
            ValueError: one of them cannot be opened.
        """
        with self._lock:
            if self._services:
                return
            try:
                opened = from_plain(SplitSetup, orjson.loads(setup)).opened(sources, _say)
            except Exception as error:
                self._failure = error
                raise
            self._services = {one.name: LoadingService(one) for one in opened}
            self._failure = None

    def load(self, source: str, wanted: Wanted) -> Loaded:
        """Return pieces of a source."""
        return self._opened(source).load(wanted)

    def decode(self, source: str, wanted: WantedItems) -> list[Decoded]:
        """Return pictures of a source."""
        return self._opened(source).decode(wanted)

    def lengths(self, source: str, rows: Int64Array) -> Int64Array:
        """Return tokens of a source's rows."""
        return self._opened(source).lengths(rows)

    def num_trained(
        self, source: str, rows: Int64Array, starts: Int64Array, stops: Int64Array
    ) -> Int64Array:
        """Return of the labelled tokens ``[start, stop)`` of rows those whose label is trained."""
        return self._opened(source).num_trained(rows, starts, stops)

    def figures(self) -> dict[str, Any] | None:
        """Return what it has done, by source; None while it has none."""
        if not self._services:
            return None
        done = {name: to_plain(one.figures) for name, one in self._services.items()}
        about = {"pid": os.getpid(), "rss_bytes": _rss_bytes(), "looked_s": time.time()}
        return {"sources": done, **about}

    def _opened(self, source: str) -> LoadingService:
        if self._failure is not None:
            raise self._failure
        if not self._services:
            raise NotOpenError("it has not opened its sources yet")
        return self._services[source]


class Constructor:
    """A node's constructor, which listens on the node's socket."""

    def __init__(self, plane: str, folder: str, shared: str, timeout_s: float) -> None:
        """Listen.

        Args:
            plane: its name.
            folder: of the node.
            shared: of the node, in shared memory.
            timeout_s: within which planner and loaders must answer.
        """
        run_hook()
        others = _Others(plane, timeout_s)
        segments = SegmentFolder.make("steps", Path(shared))
        self._service = NodeService(others, segments, timeout_s)
        self._server = NodeServer(Path(folder) / SOCKET, self._service)

    def figures(self) -> dict[str, Any]:
        """Return what it has done."""
        return {**self._service.figures(), "pid": os.getpid(), "rss_bytes": _rss_bytes()}


class _Others(Asker):
    """Planner and loaders of a plane."""

    def __init__(self, plane: str, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self._planner = planner_of(plane)
        self._planning_s: dict[str, float] = {}

    def configure(self, setup: SplitSetup) -> None:
        self.ask(self._planner, "configure", to_plain(setup), group=CONTROL)
        self._planning_s[setup.split] = self.timeout_s * setup.planning_waits

    def go_on_without(self, split: str, source: str, why: str) -> None:
        self.ask(self._planner, "go_on_without", split, source, why, group=CONTROL)

    def plan(self, split: str, position: Position, ranks: Sequence[int]) -> Answer:
        arguments = split, position.to_record(), list(ranks)
        deadline = time.monotonic() + self.timeout_s
        while True:
            found: Answer = self.ask(
                self._planner, "answer", *arguments, timeout_s=self._planning_s[split]
            )
            if found.loaders:
                return found
            if time.monotonic() > deadline:
                raise late(
                    f"split {split}: the planner knew no loaders after {self.timeout_s:.0f} s, "
                    "expected some"
                )
            time.sleep(_PAUSE_S)  # the planner was started just now and knows of none yet


def start_planner(plane: str, folder: Path, timeout_s: float) -> Any:
    """Start the planner of a plane, on this node, which holds its folder."""
    name = planner_of(plane)
    return _start(Planner, name, str(folder), timeout_s, scheduling_strategy=_here())


def start_loader(plane: str, setup: SplitSetup, sources: Sequence[str], number: int) -> Any:
    """Start one more loader of sources, on any node."""
    name, plain = loader_of(plane, setup.split, sources, number), orjson.dumps(to_plain(setup))
    return _start(Loader, name, plain, sources, scheduling_strategy="SPREAD")


def start_spare(plane: str, number: int) -> Any:
    """Start a loader whose sources are not known yet, on any node."""
    return _start(Loader, spare_of(plane, number), scheduling_strategy="SPREAD")


def open_spare(spare: Any, setup: SplitSetup, sources: Sequence[str]) -> Any:
    """Let a spare open sources, unless it has; return what will say whether it could."""
    return spare.open.remote(orjson.dumps(to_plain(setup)), sources)


def start_constructor(plane: str, node: int, folder: Path, shared: Path, timeout_s: float) -> Any:
    """Start the constructor of this node, on this node."""
    arguments = plane, str(folder), str(shared), timeout_s
    name = constructor_of(plane, node)
    return _start(Constructor, name, *arguments, scheduling_strategy=_here())


def _here() -> NodeAffinitySchedulingStrategy:
    node: str = ray.get_runtime_context().get_node_id()
    return NodeAffinitySchedulingStrategy(node, soft=False)


def _start(role: type, name: str, *arguments: Any, **options: Any) -> Any:
    groups = {"concurrency_groups": {CONTROL: 4}} if role is Planner else {}
    remote = ray.remote(**groups)(role) if groups else ray.remote(role)
    return remote.options(
        name=name,
        namespace=NAMESPACE,
        num_cpus=0,
        max_restarts=-1,
        max_concurrency=_THREADS,
        **options,
    ).remote(*arguments)


def _rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")

"""Starts and watches a plane's loaders, and tells the planner who serves."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from megatron_hdp.data_plane.actors import open_spare, start_loader, start_spare
from megatron_hdp.data_plane.names import CONTROL, loader_of, spare_of
from megatron_hdp.data_plane.records import from_plain
from megatron_hdp.data_plane.roles import Scaling, Seen
from megatron_hdp.data_plane.setup import SplitSetup

_ANSWER_S = 30.0
_LOOK_S = 0.05
_JUDGE_S = 0.45  # between two decisions how many loaders there are; looks may be more frequent
_UNKNOWN = 0.5  # neither busy nor idle


@dataclass(eq=False)
class _Loader:
    """One loader of a source, or of several."""

    name: str
    actor: Any
    sources: tuple[str, ...]
    opening: Any = None
    """What a spare was asked: to open the sources."""
    asked: Any = None
    """What it was asked and has not answered yet."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """What it said last; empty while it is being started."""
    judged: Mapping[str, Any] = field(default_factory=dict)
    """What it had said when the number of loaders was decided last."""

    def forget(self) -> None:
        """Take back what it has said: it has died, or has no source."""
        self.figures, self.judged = {}, {}


@dataclass
class _Crew:
    """The loaders that have the same sources."""

    sources: tuple[str, ...]
    loaders: list[_Loader] = field(default_factory=list)


class _Split:
    """The loaders of one split: `min` and those that stand by share sources, others have one."""

    def __init__(self, setup: SplitSetup, num_nodes: int) -> None:
        self.setup = setup
        self.scaling = Scaling(setup.loaders, num_nodes)
        sources = setup.spec.sources
        self._shared = [_Crew(names) for names in setup.loaders.crews(sources)]
        self._own = {one.name: _Crew((one.name,)) for one in sources}
        self.told: Any = None
        """What the planner was told of them last."""
        self.numbers = itertools.count()
        """Of loaders that are started, in their names."""

    def crews(self) -> Iterator[tuple[_Crew, int]]:
        """Yield all with how many loaders they should have."""
        spec = self.setup.loaders
        for one in self._shared:
            yield one, spec.min + spec.shadows
        for name, one in self._own.items():
            yield one, self.scaling.wanted[name] - spec.min

    def all(self) -> list[_Loader]:
        return [one for crew in (*self._shared, *self._own.values()) for one in crew.loaders]

    def by_source(self) -> dict[str, list[_Loader]]:
        """The first ones of each source serve, the rest stand by; see `_in_order`."""
        found, least = {}, self.setup.loaders.min
        for crew in self._shared:
            for name in crew.sources:
                own = self._own[name].loaders
                found[name] = _in_order([*crew.loaders[:least], *own, *crew.loaders[least:]])
        return {name: found[name] for name in self._own}


def _in_order(loaders: Sequence[_Loader]) -> list[_Loader]:
    """Those that are being started come last."""
    return sorted(loaders, key=lambda one: not one.figures)


def _num_serving(loaders: Sequence[_Loader], wanted: int) -> int:
    """How many of the first ones share a source's work: none that still opens it."""
    return max(1, min(wanted, sum(bool(one.figures) for one in loaders)))


class Supervisor:
    """The loaders of one plane, all of them started by this process."""

    def __init__(self, plane: str, planner: Any, num_spares: int = 0) -> None:
        """Watch from now on; `look` does all the work.

        Args:
            plane: its name.
            planner: its planner.
            num_spares: loaders that are started before anybody has said what to load.
        """
        self._plane = plane
        self._planner = planner
        self._num_spares = num_spares
        self._spares: list[tuple[str, Any]] = []
        self._splits: dict[str, _Split] = {}
        self._epoch = 0
        self._behind: dict[str, set[str]] = {}
        self._judged_at = 0.0

    def look(self, nodes: int, behind: Mapping[str, set[str]]) -> None:
        """Start what lacks, look at what there is, and tell the planner of changes.

        Args:
            nodes: nodes of the plane.
            behind: for each split, sources that a step has waited for since the last look.
        """
        for split, plain in self._ask_planner("setups").items():
            if split not in self._splits:
                self._splits[split] = _Split(from_plain(SplitSetup, plain), nodes)
        if self._num_spares and not self._splits:
            self._start_spares(nodes)
        epoch = self._ask_planner("figures")["epoch"]
        if epoch != self._epoch:  # another planner, which knows of nobody
            self._epoch = epoch
            for one in self._splits.values():
                one.told = None
        for split, sources in behind.items():
            self._behind.setdefault(split, set()).update(sources)
        is_due = time.monotonic() - self._judged_at >= _JUDGE_S
        for name, split in self._splits.items():
            self._look_at(split, self._behind.get(name, set()) if is_due else None)
        if is_due:
            self._judged_at, self._behind = time.monotonic(), {}
        if self._splits:
            self._num_spares = 0
            while self._spares:  # sources without a document need none
                ray.kill(self._spares.pop()[1], no_restart=True)

    def figures(self) -> dict[str, Any]:
        """Return what each loader said last, by split and source."""
        return {
            name: {
                source: {
                    "wanted": split.scaling.wanted.get(source, 0),
                    "loaders": [_part(one.figures, source) for one in loaders],
                }
                for source, loaders in split.by_source().items()
            }
            for name, split in self._splits.items()
        }

    def _look_at(self, split: _Split, behind: set[str] | None) -> None:
        scaling, loaders = split.scaling, split.all()
        _hear(loaders, split.setup)
        if behind is not None or not scaling.wanted:
            late = behind or set()
            crews = split.by_source()
            scaling.look({name: _seen(name, crews[name], name in late) for name in crews})
            for one in loaders:
                one.judged = one.figures
        for crew, total in split.crews():
            while len(crew.loaders) < total:
                crew.loaders.append(self._manned(crew.sources, split))
            for one in _in_order(crew.loaders)[total:]:
                ray.kill(one.actor, no_restart=True)
                crew.loaders.remove(one)
        by_source = split.by_source()
        serving = {name: tuple(one.name for one in found) for name, found in by_source.items()}
        wanted = scaling.wanted
        told = serving, {name: _num_serving(by_source[name], wanted[name]) for name in by_source}
        if split.told != told:
            self._ask_planner("serve", split.setup.split, *told)
            split.told = told

    def _manned(self, sources: tuple[str, ...], split: _Split) -> _Loader:
        """Return one more loader of sources: a spare, as long as there are any."""
        if self._spares:
            name, spare = self._spares.pop(0)
            return _Loader(name, spare, sources, open_spare(spare, split.setup, sources))
        number = next(split.numbers)
        name = loader_of(self._plane, split.setup.split, sources, number)
        return _Loader(name, start_loader(self._plane, split.setup, sources, number), sources)

    def _start_spares(self, nodes: int) -> None:
        """Start the spares once all nodes are there, so that they are spread over them."""
        if not self._spares and sum(one["Alive"] for one in ray.nodes()) >= nodes:
            self._spares = [
                (spare_of(self._plane, number), start_spare(self._plane, number))
                for number in range(self._num_spares)
            ]

    def _ask_planner(self, method: str, *arguments: Any) -> Any:
        call = getattr(self._planner, method).options(concurrency_group=CONTROL)
        return ray.get(call.remote(*arguments), timeout=_ANSWER_S)


def _hear(loaders: Sequence[_Loader], setup: SplitSetup) -> None:
    """Ask a split's loaders what they do, and note what those say that answer at once."""
    for one in loaders:
        if one.asked is None:
            one.asked = one.actor.figures.remote()
    asked = [one.asked for one in loaders]
    ready = ray.wait(asked, num_returns=len(asked), timeout=_LOOK_S)[0] if asked else []
    for one in loaders:
        if one.asked not in ready:
            continue
        answer, one.asked = one.asked, None
        try:
            found = ray.get(answer)
        except RayError:  # it has died; Ray starts it again
            one.forget()
            continue
        if found is not None:
            one.figures = found
            continue
        one.forget()  # a spare that has not opened its sources, or was started again
        if _may_open(one.opening):
            one.opening = open_spare(one.actor, setup, one.sources)


def _may_open(opening: Any) -> bool:
    """Whether a spare that has no source must be asked once more to open it."""
    has_ended, _ = ray.wait([opening], timeout=0)
    if not has_ended:
        return False
    try:
        ray.get(opening)
    except RayError as error:  # it has died, or cannot open it, as who asks for its rows hears
        return not isinstance(error, RayTaskError)
    return True


def _part(said: Mapping[str, Any], source: str) -> dict[str, Any]:
    """What a loader has said of one of its sources, with that one's part of the memory."""
    if not said:
        return {}
    done = said["sources"]
    rss_bytes = said["rss_bytes"] // len(done)
    return {**done[source], **{n: said[n] for n in ("pid", "looked_s")}, "rss_bytes": rss_bytes}


def _seen(source: str, loaders: Sequence[_Loader], is_behind: bool) -> Seen:
    """What a source's loaders have done for it since they were judged last.

    While one is being started, nobody knows yet how much it will help.
    """
    spans = [(_part(one.judged, source), _part(one.figures, source)) for one in loaders]
    most_mb = max((now["rss_bytes"] / 2**20 for _, now in spans if now), default=0.0)
    busy = [
        (now["busy_s"] - before["busy_s"]) / max(now["looked_s"] - before["looked_s"], 1e-3)
        for before, now in spans
        if before and now
        if now["pid"] == before["pid"] and now["looked_s"] > before["looked_s"]
    ]
    if not all(now for _, now in spans):
        return Seen(_UNKNOWN, False, most_mb)
    return Seen(sum(busy) / len(busy) if busy else _UNKNOWN, is_behind, most_mb)

"""Starts and watches a plane's loaders, and tells the planner who serves."""

from __future__ import annotations

import time
from collections.abc import Mapping
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


@dataclass
class _Crew:
    """The loaders of one source of one split."""

    source: str
    actors: dict[int, Any] = field(default_factory=dict)
    """By number; the first ones serve, the rest stand by."""
    names: dict[int, str] = field(default_factory=dict)
    opening: dict[int, Any] = field(default_factory=dict)
    """What spares among them were asked: to open the source."""
    figures: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """What each said last; a loader without any is being started."""
    judged: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """What each had said when their number was decided last."""
    asked: dict[int, Any] = field(default_factory=dict)
    """What each was asked and has not answered yet."""
    next_number: int = 0

    def add(self, name: str, actor: Any) -> int:
        """Take one more; return its number."""
        number, self.next_number = self.next_number, self.next_number + 1
        self.actors[number], self.names[number] = actor, name
        return number

    def remove(self, number: int) -> Any:
        """Let one go; return it."""
        self.forget(number)
        for kept in (self.names, self.opening, self.asked):
            kept.pop(number, None)
        return self.actors.pop(number)

    def forget(self, number: int) -> None:
        """Take back what one has said: it has died, or is no longer one of them."""
        self.figures.pop(number, None)
        self.judged.pop(number, None)

    def order(self) -> list[int]:
        """Those that answer first, those that are being started at the end."""
        return sorted(self.actors, key=lambda number: (number not in self.figures, number))

    def num_serving(self, wanted: int) -> int:
        """How many of the first ones share the work: none that still opens the source."""
        return max(1, min(wanted, len(self.figures)))


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
        self._setups: dict[str, SplitSetup] = {}
        self._crews: dict[str, dict[str, _Crew]] = {}
        self._scaling: dict[str, Scaling] = {}
        self._told: dict[str, Any] = {}
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
            if split not in self._crews:
                setup = from_plain(SplitSetup, plain)
                self._setups[split] = setup
                self._scaling[split] = Scaling(setup.loaders, nodes)
                self._crews[split] = {one.name: _Crew(one.name) for one in setup.spec.sources}
        if not self._setups:
            self._start_spares(nodes)
        epoch = self._ask_planner("figures")["epoch"]
        if epoch != self._epoch:  # another planner, which knows of nobody
            self._epoch, self._told = epoch, {}
        for split, sources in behind.items():
            self._behind.setdefault(split, set()).update(sources)
        is_due = time.monotonic() - self._judged_at >= _JUDGE_S
        for split, crews in self._crews.items():
            self._look_at(split, crews, self._behind.get(split, set()) if is_due else None)
        if is_due:
            self._judged_at, self._behind = time.monotonic(), {}
        if self._setups:
            self._num_spares = 0
            while self._spares:  # sources without a document need none
                ray.kill(self._spares.pop()[1], no_restart=True)

    def figures(self) -> dict[str, Any]:
        """Return what each loader said last, by split and source."""
        return {
            split: {
                name: {
                    "wanted": self._scaling[split].wanted.get(name, 0),
                    "loaders": [dict(crew.figures.get(one, {})) for one in crew.order()],
                }
                for name, crew in crews.items()
            }
            for split, crews in self._crews.items()
        }

    def _look_at(self, split: str, crews: Mapping[str, _Crew], behind: set[str] | None) -> None:
        scaling, setup = self._scaling[split], self._setups[split]
        for crew in crews.values():
            _hear(crew, setup)
        if behind is not None or not scaling.wanted:
            late = behind or set()
            scaling.look({name: _seen(crew, name in late) for name, crew in crews.items()})
        wanted = scaling.wanted
        for name, crew in crews.items():
            total = wanted[name] + setup.loaders.shadows
            while len(crew.actors) < total:
                self._man(crew, setup)
            for number in crew.order()[total:]:
                ray.kill(crew.remove(number), no_restart=True)
        serving = {
            name: tuple(crew.names[one] for one in crew.order()) for name, crew in crews.items()
        }
        told = serving, {name: crew.num_serving(wanted[name]) for name, crew in crews.items()}
        if self._told.get(split) != told:
            self._ask_planner("serve", split, *told)
            self._told[split] = told

    def _man(self, crew: _Crew, setup: SplitSetup) -> None:
        """Give a source one more loader: a spare, as long as there are any."""
        if self._spares:
            name, spare = self._spares.pop(0)
            number = crew.add(name, spare)
            crew.opening[number] = open_spare(spare, setup, crew.source)
            return
        number = crew.next_number
        name = loader_of(self._plane, setup.split, crew.source, number)
        crew.add(name, start_loader(self._plane, setup, crew.source, number))

    def _start_spares(self, nodes: int) -> None:
        """Start the spares once all nodes are there, so that they are spread over them."""
        if len(self._spares) < self._num_spares and _num_nodes() >= nodes:
            for number in range(self._num_spares):
                self._spares.append(
                    (spare_of(self._plane, number), start_spare(self._plane, number))
                )

    def _ask_planner(self, method: str, *arguments: Any) -> Any:
        call = getattr(self._planner, method).options(concurrency_group=CONTROL)
        return ray.get(call.remote(*arguments), timeout=_ANSWER_S)


def _num_nodes() -> int:
    return sum(one["Alive"] for one in ray.nodes())


def _hear(crew: _Crew, setup: SplitSetup) -> None:
    """Ask a source's loaders what they do, and note what those say that answer at once."""
    for number, actor in crew.actors.items():
        if number not in crew.asked:
            crew.asked[number] = actor.figures.remote()
    if not crew.asked:
        return
    asked = list(crew.asked.values())
    ready, _ = ray.wait(asked, num_returns=len(asked), timeout=_LOOK_S)
    for number, one in list(crew.asked.items()):
        if one not in ready:
            continue
        del crew.asked[number]
        try:
            found = ray.get(one)
        except RayError:  # it has died; Ray starts it again
            crew.forget(number)
            continue
        if found is not None:
            crew.figures[number] = found
            continue
        crew.forget(number)  # a spare that has not opened its source, or was started again
        if _may_open(crew.opening[number]):
            crew.opening[number] = open_spare(crew.actors[number], setup, crew.source)


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


def _seen(crew: _Crew, is_behind: bool) -> Seen:
    """What a source's loaders have done since they were judged last.

    While one is being started, nobody knows yet how much it will help.
    """
    sizes = [one["rss_bytes"] / 2**20 for one in crew.figures.values()]
    busy = [
        (found["busy_s"] - before["busy_s"]) / max(found["looked_s"] - before["looked_s"], 1e-3)
        for number, found in crew.figures.items()
        if (before := crew.judged.get(number)) is not None
        and found["pid"] == before["pid"]
        and found["looked_s"] > before["looked_s"]
    ]
    crew.judged = dict(crew.figures)
    if len(crew.figures) < len(crew.actors):
        return Seen(_UNKNOWN, False, max(sizes, default=0.0))
    busy_share = sum(busy) / len(busy) if busy else _UNKNOWN
    return Seen(busy_share, is_behind, max(sizes, default=0.0))

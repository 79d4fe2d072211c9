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


@dataclass(eq=False)
class _Loader:
    """One loader of a source."""

    name: str
    actor: Any
    opening: Any = None
    """What a spare was asked: to open the source."""
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
    """The loaders of one source of one split."""

    source: str
    loaders: list[_Loader] = field(default_factory=list)
    num_ever: int = 0

    def add(self, name: str, actor: Any, opening: Any = None) -> None:
        self.loaders.append(_Loader(name, actor, opening))
        self.num_ever += 1

    def order(self) -> list[_Loader]:
        """The first ones serve, the rest stand by; those that are being started come last."""
        return sorted(self.loaders, key=lambda one: not one.figures)

    def num_serving(self, wanted: int) -> int:
        """How many of the first ones share the work: none that still opens the source."""
        return max(1, min(wanted, sum(bool(one.figures) for one in self.loaders)))


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
        if self._num_spares and not self._setups:
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
                    "loaders": [dict(one.figures) for one in crew.order()],
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
            while len(crew.loaders) < total:
                self._man(crew, setup)
            for one in crew.order()[total:]:
                ray.kill(one.actor, no_restart=True)
                crew.loaders.remove(one)
        serving = {name: tuple(one.name for one in crew.order()) for name, crew in crews.items()}
        told = serving, {name: crew.num_serving(wanted[name]) for name, crew in crews.items()}
        if self._told.get(split) != told:
            self._ask_planner("serve", split, *told)
            self._told[split] = told

    def _man(self, crew: _Crew, setup: SplitSetup) -> None:
        """Give a source one more loader: a spare, as long as there are any."""
        if self._spares:
            name, spare = self._spares.pop(0)
            crew.add(name, spare, open_spare(spare, setup, crew.source))
            return
        number = crew.num_ever
        name = loader_of(self._plane, setup.split, crew.source, number)
        crew.add(name, start_loader(self._plane, setup, crew.source, number))

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


def _hear(crew: _Crew, setup: SplitSetup) -> None:
    """Ask a source's loaders what they do, and note what those say that answer at once."""
    for one in crew.loaders:
        if one.asked is None:
            one.asked = one.actor.figures.remote()
    asked = [one.asked for one in crew.loaders]
    ready = ray.wait(asked, num_returns=len(asked), timeout=_LOOK_S)[0] if asked else []
    for one in crew.loaders:
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
        one.forget()  # a spare that has not opened its source, or was started again
        if _may_open(one.opening):
            one.opening = open_spare(one.actor, setup, crew.source)


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
    told = [one for one in crew.loaders if one.figures]
    most_mb = max((one.figures["rss_bytes"] / 2**20 for one in told), default=0.0)
    spans = [(one.judged, one.figures) for one in told if one.judged]
    busy = [
        (now["busy_s"] - before["busy_s"]) / max(now["looked_s"] - before["looked_s"], 1e-3)
        for before, now in spans
        if now["pid"] == before["pid"] and now["looked_s"] > before["looked_s"]
    ]
    for one in told:
        one.judged = one.figures
    if len(told) < len(crew.loaders):
        return Seen(_UNKNOWN, False, most_mb)
    return Seen(sum(busy) / len(busy) if busy else _UNKNOWN, is_behind, most_mb)

"""Starts and watches a plane's loaders, and tells the planner who serves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError

from megatron_hdp.data_plane.actors import start_loader
from megatron_hdp.data_plane.names import CONTROL, loader_of
from megatron_hdp.data_plane.records import from_plain
from megatron_hdp.data_plane.roles import Scaling, Seen
from megatron_hdp.data_plane.setup import SplitSetup

_ANSWER_S = 30.0
_LOOK_S = 0.05
_UNKNOWN = 0.5  # neither busy nor idle


@dataclass
class _Crew:
    """The loaders of one source of one split."""

    source: str
    actors: dict[int, Any] = field(default_factory=dict)
    """By number; the first ones serve, the rest stand by."""
    figures: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """What each said last; a loader without any is being started."""
    asked: dict[int, Any] = field(default_factory=dict)
    """What each was asked and has not answered yet."""
    next_number: int = 0

    def order(self) -> list[int]:
        """Those that answer first, those that are being started at the end."""
        return sorted(self.actors, key=lambda number: (number not in self.figures, number))


class Supervisor:
    """The loaders of one plane, all of them started by this process."""

    def __init__(self, plane: str, planner: Any) -> None:
        """Watch from now on; `look` does all the work."""
        self._plane = plane
        self._planner = planner
        self._setups: dict[str, SplitSetup] = {}
        self._crews: dict[str, dict[str, _Crew]] = {}
        self._scaling: dict[str, Scaling] = {}
        self._told: dict[str, Any] = {}
        self._epoch = 0

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
        epoch = self._ask_planner("figures")["epoch"]
        if epoch != self._epoch:  # another planner, which knows of nobody
            self._epoch, self._told = epoch, {}
        for split, crews in self._crews.items():
            self._look_at(split, crews, behind.get(split, set()))

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

    def _look_at(self, split: str, crews: Mapping[str, _Crew], behind: set[str]) -> None:
        scaling, setup = self._scaling[split], self._setups[split]
        wanted = scaling.look(
            {name: self._seen(crew, name in behind) for name, crew in crews.items()}
        )
        for name, crew in crews.items():
            total = wanted[name] + setup.loaders.shadows
            while len(crew.actors) < total:
                number, crew.next_number = crew.next_number, crew.next_number + 1
                crew.actors[number] = start_loader(self._plane, setup, name, number)
            for number in crew.order()[total:]:
                ray.kill(crew.actors.pop(number), no_restart=True)
                crew.figures.pop(number, None)
                crew.asked.pop(number, None)
        serving = {
            name: tuple(loader_of(self._plane, split, name, one) for one in crew.order())
            for name, crew in crews.items()
        }
        told = serving, {name: max(wanted[name], 1) for name in crews}
        if self._told.get(split) != told:
            self._ask_planner("serve", split, *told)
            self._told[split] = told

    def _seen(self, crew: _Crew, is_behind: bool) -> Seen:
        """What a source's loaders say, as far as they answer at once."""
        for number, actor in crew.actors.items():
            if number not in crew.asked:
                crew.asked[number] = actor.figures.remote()
        ready: list[Any] = []
        if crew.asked:
            ready, _ = ray.wait(
                list(crew.asked.values()), num_returns=len(crew.asked), timeout=_LOOK_S
            )
        busy = []
        for number, one in list(crew.asked.items()):
            if one not in ready:
                continue
            del crew.asked[number]
            try:
                found = ray.get(one)
            except RayError:  # it has died; Ray starts it again
                crew.figures.pop(number, None)
                continue
            before = crew.figures.get(number)
            if before is not None and found["pid"] == before["pid"]:
                passed_s = max(found["looked_s"] - before["looked_s"], 1e-3)
                busy.append((found["busy_s"] - before["busy_s"]) / passed_s)
            crew.figures[number] = found
        sizes = [one["rss_bytes"] / 2**20 for one in crew.figures.values()]
        busy_share = sum(busy) / len(busy) if busy else _UNKNOWN
        return Seen(busy_share, is_behind, max(sizes, default=0.0))

    def _ask_planner(self, method: str, *arguments: Any) -> Any:
        call = getattr(self._planner, method).options(concurrency_group=CONTROL)
        return ray.get(call.remote(*arguments), timeout=_ANSWER_S)

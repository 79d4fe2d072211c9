"""A rank loads by itself while its data plane starts, where a step should not wait for that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_hdp.data.media import Decoded
from megatron_hdp.data.mixture import Position
from megatron_hdp.data.order import SourceOrder
from megatron_hdp.data.steps import Loaders, LocalLoaders, RankStep, WantedItem
from megatron_hdp.data_plane.loaders import RayLoaders


class LocalUntilPlane:
    """The `Loaders` of one rank: its own ones until the data plane has answered.

    Both give the same steps, so that every rank changes over when it can. A data plane that never
    answers ends the run, as it does where nothing else loads.

    Args:
        local: the rank's own ones.
        plane: what asks the data plane.
    """

    def __init__(self, local: LocalLoaders, plane: RayLoaders) -> None:
        self._local, self._plane = local, plane
        self._has_asked = False
        self._used: Loaders = local
        self._expecting: Loaders | None = None
        self.num_loaders: int | None = None
        self.steps_ahead: int | None = None

    def follow(self, orders: Mapping[str, SourceOrder]) -> None:
        """Draw from now on in these orders of the sources; before the first step."""
        self._local.follow(orders)
        self._plane.follow(orders)

    def expect(self, position: Position) -> None:
        """Begin to prepare the step that begins at a position: it will be wanted next."""
        self._expecting = self._ready(position)
        self._expecting.expect(position)

    def get(self, position: Position) -> RankStep:
        """Return the step that begins at a position.

        Raises:
            ValueError: nothing of the step carries loss, or the data cannot be read.
            DataPlaneLost: the data plane does not answer; its log stays.
        """
        expecting, self._expecting = self._expecting, None
        self._used = used = expecting or self._ready(position)
        step = used.get(position)
        self.num_loaders, self.steps_ahead = used.num_loaders, used.steps_ahead
        return step

    def _ready(self, position: Position) -> Loaders:
        if not self._has_asked:
            self._has_asked = True
            self._plane.expect(position)
            return self._local
        if self._used is self._plane or self._plane.has_answered:
            return self._plane
        return self._local

    def statically(self, step: RankStep, failure: str) -> RankStep:
        """Return a step under the static plan, read anew: a planner of a rank may fail alone."""
        return self._local.statically(step, failure)

    def decode(self, position: Position, wanted: Sequence[WantedItem]) -> list[Decoded]:
        """Return pictures, decoded by who gave the step."""
        return self._used.decode(position, wanted)

    def interrupt(self) -> None:
        """From any thread: who waits for the data plane gets `DataPlaneLost`, now and later."""
        self._plane.interrupt()

    def close(self) -> None:
        """End both."""
        self._plane.close()
        self._local.close()

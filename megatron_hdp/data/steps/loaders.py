"""What a rank gets of steps, and where from; loaders in its own process are the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from megatron_hdp.data.media import Decoded, StoredItem, decoded
from megatron_hdp.data.mixture import Position
from megatron_hdp.data.one_ahead import OneAhead
from megatron_hdp.data.order import SourceOrder
from megatron_hdp.data.steps.micro_batch import (
    RankMicroBatch,
    Reader,
    TokenSource,
    read_micro_batch,
)
from megatron_hdp.data.steps.planning import StepPlanner
from megatron_hdp.data.steps.settings import PlannedStep
from megatron_hdp.data.steps.share import RankShare
from megatron_hdp.data.steps.totals import StepTotals


@dataclass(frozen=True)
class LostSource:
    """What a rank was not given of a source that has failed."""

    name: str
    why: str
    ids: tuple[int, ...]
    """Places in the step of its sequences in this rank's share: they stand in its micro-batches
    with token 0 and without loss."""


@dataclass(frozen=True)
class RankStep:
    """A step as one rank runs it."""

    totals: StepTotals
    share: RankShare
    micro_batches: tuple[RankMicroBatch, ...]
    """Padding included, in the order in which they run."""
    lost: tuple[LostSource, ...] = ()
    planned: PlannedStep | None = field(default=None, compare=False)
    """The whole step, where the rank has drawn it itself or has to encode pictures of it."""
    items: object = field(default=None, compare=False)
    """What the rank does with the step's items, for those who prepare that ahead."""


@dataclass(frozen=True)
class WantedItem:
    """An item of a step that a rank encodes, which is read there."""

    source: int
    row: int
    place: int
    """Among the items of its row."""
    item: StoredItem


def read_step(
    totals: StepTotals, share: RankShare, reader: Reader, source: TokenSource
) -> RankStep:
    """Read a rank's share of a step."""
    micro_batches = tuple(
        read_micro_batch(share, slot, reader, source) for slot in range(share.num_slots)
    )
    return RankStep(totals, share, micro_batches)


class Loaders(Protocol):
    """Gives one rank its steps over one split of the data.

    Attributes:
        num_loaders: loaders beside the ranks, of all sources; None where there are none.
        steps_ahead: steps that lie ready behind the latest one; None where that is not counted.
    """

    num_loaders: int | None
    steps_ahead: int | None

    def follow(self, orders: Mapping[str, SourceOrder]) -> None:
        """Draw from now on in these orders of the sources; before the first step."""

    def expect(self, position: Position) -> None:
        """Begin to prepare the step that begins at a position: it will be wanted next."""

    def get(self, position: Position) -> RankStep:
        """Return the step that begins at a position.

        Raises:
            ValueError: nothing of the step carries loss, or every source has ended.
        """

    def statically(self, step: RankStep, failure: str) -> RankStep:
        """Return a step under the static plan: planning it failed on another rank."""

    def decode(self, position: Position, wanted: Sequence[WantedItem]) -> list[Decoded]:
        """Return pictures of the step that begins at a position.

        Raises:
            ValueError: a file cannot be read.
        """

    def interrupt(self) -> None:
        """From any thread: who waits here for another process raises."""

    def close(self) -> None:
        """End what prepares steps that will not run."""


class LocalLoaders:
    """In the rank's own process: it draws and plans the whole step and reads its own part.

    Nothing here communicates, so the next step is prepared in a thread.
    """

    num_loaders: int | None = None
    steps_ahead: int | None = None

    def __init__(self, planner: StepPlanner, reader: Reader) -> None:
        """Prepare what `planner` draws and plans for `reader`."""
        self._planner = planner
        self._reader = reader
        self._ahead = OneAhead(self.prepare, Position.key)

    def follow(self, orders: Mapping[str, SourceOrder]) -> None:
        """Draw from now on in these orders of the sources; before the first step."""
        self._planner.follow(orders)

    def expect(self, position: Position) -> None:
        """Prepare the step that begins at a position, in the background."""
        self._ahead.expect(position)

    def get(self, position: Position) -> RankStep:
        """Return the step that begins at a position; raise what preparing it raised."""
        return self._ahead.get(position)

    def statically(self, step: RankStep, failure: str) -> RankStep:
        """Return a step under the static plan, read anew."""
        return self._read(self._planner.statically(step.totals.before, failure))

    def decode(self, position: Position, wanted: Sequence[WantedItem]) -> list[Decoded]:
        """Return pictures, decoded now in as many threads as this process may use processors.

        Raises:
            ValueError: a file cannot be read.
        """
        return decoded([one.item for one in wanted])

    def interrupt(self) -> None:
        """Nothing: nobody waits here for another process."""

    def close(self) -> None:
        """Wait for what is being prepared and end the thread."""
        self._ahead.close()

    def prepare(self, position: Position) -> RankStep:
        """Return the step that begins at a position, prepared now.

        Raises:
            ValueError: nothing of the step carries loss, or every source has ended.
        """
        return self._read(self._planner.plan(position))

    def _read(self, planned: PlannedStep) -> RankStep:
        corpus = self._planner.corpus
        (share,) = self._planner.shares(planned).of([self._reader.hdp_rank])
        window = self._planner.settings.window
        totals = StepTotals.of(planned, len(corpus.sources), window=window)
        return replace(read_step(totals, share, self._reader, corpus), planned=planned)

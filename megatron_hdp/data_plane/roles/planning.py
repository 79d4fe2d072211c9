"""The planner: decides what stands in each step, a few steps ahead, from metadata alone."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from megatron_hdp.data.mixture import Position
from megatron_hdp.data.steps import (
    PackedShares,
    PlannedStep,
    RankShare,
    StepPlanner,
    StepShares,
    StepTotals,
)
from megatron_hdp.data_plane.roles.failures import SourceFailure
from megatron_hdp.data_plane.roles.journal import Entry, Journal

_Key = tuple[object, ...]
_REMEMBERED = 2048  # steps that are decided again as they were


@dataclass(frozen=True)
class Answer:
    """What some ranks hear of a step."""

    epoch: int
    """Of the planner that says it."""
    totals: StepTotals
    shares: list[RankShare]
    loaders: Mapping[str, tuple[str, ...]]
    """Of each source, by name: whom to ask for its tokens, those that stand by at the end."""
    num_serving: Mapping[str, int]
    """How many of them, from the first, share the work."""
    planned: PlannedStep | None = None
    """The whole step, where it may have pictures: any rank may have to encode any of them."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle shares as a few strings; arrays, dozens a node, would take three times as long."""
        packed = PackedShares.of(self.shares)
        serving = self.loaders, self.num_serving
        return _answer, (self.epoch, self.totals, packed, *serving, self.planned)


def _answer(epoch: int, totals: StepTotals, packed: PackedShares, *others: Any) -> Answer:
    return Answer(epoch, totals, packed.unpack(), *others)


@dataclass(frozen=True)
class _Decided:
    totals: StepTotals
    shares: StepShares
    planned: PlannedStep | None


class PlanningService:
    """The steps over one split of the data.

    A step is a function of the position at which it begins, so any planner decides the same. The
    journal shows that it did: a step whose fingerprints are not those that were answered before is
    refused.

    A source that has failed is missing in all steps that are decided from then on, by this planner
    and by those that take over; what was decided before may run somewhere, and stays.
    """

    def __init__(
        self, split: str, planner: StepPlanner, journal: Journal, *, steps_ahead: int
    ) -> None:
        """Decide steps from now on.

        Args:
            split: name of the split.
            planner: draws and plans.
            journal: what is decided goes there before it is answered.
            steps_ahead: steps that are decided before they are asked for.
        """
        self._split = split
        self._planner = planner
        self._journal = journal
        self._steps_ahead = steps_ahead
        self._lock = threading.Lock()
        self._steps: OrderedDict[_Key, Future[_Decided]] = OrderedDict()
        self._asked: _Key | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"plan-{split}")
        self._loaders: Mapping[str, tuple[str, ...]] = {}
        self._num_serving: Mapping[str, int] = {}
        self._before: OrderedDict[_Key, Entry] = OrderedDict()
        self._failed: dict[str, str] = {}
        for one in journal.entries():
            if one.split == split:
                self._remember(Position.from_record(one.before), one)
                self._failed |= one.without

    @property
    def num_ahead(self) -> int:
        """Steps that are decided and wait to be asked for: those after the one asked for last."""
        with self._lock:
            ahead = list(self._steps.items())
            numbers = [i for i, (key, _) in enumerate(ahead) if key == self._asked]
            return sum(one.done() for _, one in ahead[numbers[0] + 1 if numbers else 0 :])

    @property
    def failed(self) -> dict[str, str]:
        """Sources that nothing is drawn of any more, and why."""
        with self._lock:
            return dict(self._failed)

    def go_on_without(self, source: str, why: str) -> None:
        """Draw nothing more of a source in steps that are not decided yet.

        Raises:
            ValueError: the source is none that a run goes on without.
        """
        names = [one.name for one in self._planner.corpus.spec.sources if one.may_fail]
        if source not in names:
            raise ValueError(
                f"found the source '{source}', expected one with on-failure: go-on-without: "
                f"{', '.join(names) or 'there is none'}"
            )
        with self._lock:
            self._failed.setdefault(source, why)

    def serve(self, loaders: Mapping[str, tuple[str, ...]], num_serving: Mapping[str, int]) -> None:
        """Tell from now on that these loaders serve the sources; see `Answer`."""
        self._loaders, self._num_serving = dict(loaders), dict(num_serving)

    def answer(self, position: Position, ranks: Sequence[int]) -> Answer:
        """Return the shares of some HDP ranks in the step that begins at a position.

        Raises:
            FencedError: another planner has taken over.
            ValueError: nothing of the step carries loss, or every source has ended, or the data
                have changed since the step was first decided.
        """
        decided = self._decided(position).result()
        self._asked = position.key()
        self._expect_after(position, decided.totals, self._steps_ahead)
        found = decided.shares.of(ranks)
        self._journal.require_current()  # the last thing before it is told
        return Answer(
            epoch=self._journal.epoch,
            totals=decided.totals,
            shares=found,
            loaders=self._loaders,
            num_serving=self._num_serving,
            planned=decided.planned,
        )

    def close(self) -> None:
        """End what decides steps ahead."""
        self._thread.shutdown(cancel_futures=True)

    def _decided(self, position: Position) -> Future[_Decided]:
        """The step, decided before or soon; what lies before it is forgotten."""
        with self._lock:
            future = self._steps.get(position.key())
            if future is None:
                future = self._thread.submit(self._decide, position)
                self._steps[position.key()] = future
            while len(self._steps) > 2 * self._steps_ahead + 2:
                self._steps.popitem(last=False)
            return future

    def _expect_after(self, asked: Position, totals: StepTotals, count: int) -> None:
        """Begin to decide what follows a step, as far as what was asked with allows."""
        following = totals.after.knowing(asked)
        if not count or not following.is_decidable:
            return

        def go_on(done: Future[_Decided]) -> None:
            if not done.cancelled() and done.exception() is None:
                self._expect_after(asked, done.result().totals, count - 1)

        self._decided(following).add_done_callback(go_on)

    def _decide(self, position: Position) -> _Decided:
        known = self._before.get(position.key())
        while True:
            try:
                return self._decide_as(position, known)
            except SourceFailure as failure:
                self.go_on_without(failure.source, failure.why)
                # One that is known cannot be made any more as it was. Should ranks run it already,
                # they will find that their plans differ.
                known = None

    def _decide_as(self, position: Position, known: Entry | None) -> _Decided:
        """Decide a step, as it was decided before if it is known.

        Raises:
            SourceFailure: a source does not say how long its rows are.
        """
        without = self.failed if known is None else dict(known.without)
        names = tuple(sorted({*position.without, *without}))
        begin = replace(position, without=names)
        if known is None or known.failure is None:
            planned = self._planned(begin, without)
        else:  # ranks may run the static plan already
            planned = self._planner.statically(begin, known.failure)
        window, num_sources = self._planner.settings.window, len(self._planner.corpus.sources)
        totals = StepTotals.of(planned, num_sources, without, window)
        if known is None:
            entry = Entry(
                split=self._split,
                before=replace(position, losses=None, costs=None).to_record(),
                after=replace(totals.after, losses=None, costs=None).to_record(),
                fingerprints=totals.fingerprints,
                failure=totals.failure,
                without=without,
            )
            self._journal.append(entry)
            self._remember(position, entry)
        elif dict(known.fingerprints) != dict(totals.fingerprints):
            raise ValueError(
                f"step {position.steps + 1} differs from when it was first decided (found "
                f"{dict(totals.fingerprints)}, expected {dict(known.fingerprints)}): the data "
                "changed during the run: restore them"
            )
        has_media = self._planner.corpus.has_media
        return _Decided(totals, self._planner.shares(planned), planned if has_media else None)

    def _planned(self, begin: Position, without: Mapping[str, str]) -> PlannedStep:
        try:
            return self._planner.plan(begin)
        except ValueError as error:
            if not without:
                raise
            failed = "; ".join(f"source '{name}': {why}" for name, why in without.items())
            raise ValueError(
                f"{error}. The run continues without the sources that failed: {failed}"
            ) from None

    def _remember(self, position: Position, entry: Entry) -> None:
        self._before[position.key()] = entry
        while len(self._before) > _REMEMBERED:
            self._before.popitem(last=False)

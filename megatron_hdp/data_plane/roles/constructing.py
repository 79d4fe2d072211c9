"""A constructor: fetches what the ranks of its node read of a step, once, and lays it out."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import numpy as np

from megatron_hdp.data.mixture import Position
from megatron_hdp.data.steps import Pieces, RankStep, Reader, pieces_of
from megatron_hdp.data_plane.roles.decoding import Crew
from megatron_hdp.data_plane.roles.failures import FAILURES, why_of
from megatron_hdp.data_plane.roles.fetched import Fetched
from megatron_hdp.data_plane.roles.loading import Loaded, Wanted, turns_of
from megatron_hdp.data_plane.roles.planning import Answer

T = TypeVar("T")

AskPlanner = Callable[[Position, Sequence[int]], Answer]
"""For the shares of HDP ranks in the step that begins at a position; blocks."""
AskLoader = Callable[[str, Sequence[str], Wanted], Loaded]
"""For pieces of a source, by name, of these loaders: the first, or another if that fails; blocks,
and several threads call it."""
TellPlanner = Callable[[str, str], None]
"""That a source, by name, has failed, and why; may be told again."""


class StaleAnswerError(RuntimeError):
    """A planner has answered that another one has replaced."""


@dataclass
class ConstructorFigures:
    """What a constructor has done since it began."""

    steps: int = 0
    fetched_bytes: int = 0
    waited_for: Counter[str] = field(default_factory=Counter)
    """By source: steps that a rank waited for and whose tokens it gave last."""


class ConstructingService(Generic[T]):
    """Makes the steps of one split for the ranks of one node.

    `steps_ahead` of them are made before they are asked for; so many and two more are kept.
    """

    def __init__(
        self,
        names: Sequence[str],
        ask_planner: AskPlanner,
        ask_loader: AskLoader,
        lay_out: Callable[[RankStep], T],
        let_go: Callable[[T], None],
        *,
        steps_ahead: int,
        may_fail: Collection[str] = (),
        tell_planner: TellPlanner = lambda source, why: None,
    ) -> None:
        """Make steps by asking others.

        Args:
            names: of the sources.
            ask_planner: for shares.
            ask_loader: for tokens.
            lay_out: puts a reader's step where the reader finds it.
            let_go: frees what was laid out.
            steps_ahead: steps that are made before they are asked for.
            may_fail: names of the sources without which a run goes on: what they do not give of a
                step is lost.
            tell_planner: of such a source that has failed.
        """
        self._names = tuple(names)
        self._ask_planner = ask_planner
        self._ask_loader = ask_loader
        self._lay_out = lay_out
        self._let_go = let_go
        self._steps_ahead = steps_ahead
        self._may_fail = frozenset(may_fail)
        self._tell_planner = tell_planner
        self._failed: dict[str, str] = {}
        """Sources that were asked in vain and are asked no more, and why."""
        self._lock = threading.Lock()
        self._readers: dict[Reader, None] = {}
        self._steps: OrderedDict[tuple[object, ...], dict[Reader, Future[_Made[T]]]]
        self._steps = OrderedDict()
        """By position, for each reader that a step is made for."""
        self._num_waiting: Counter[tuple[object, ...]] = Counter()
        self._makers = ThreadPoolExecutor(1, thread_name_prefix="make")
        self._fetchers = ThreadPoolExecutor(16, thread_name_prefix="fetch")
        self._epoch = 0
        self._is_closed = False
        self.num_loaders = 0
        """Of all sources, when the latest step was made; those that stand by included."""
        self.figures = ConstructorFigures()

    @property
    def num_ahead(self) -> int:
        """Steps that are made, beside the one that was asked for last."""
        with self._lock:
            steps = [step.values() for step in self._steps.values() if step]
            made = [all(one.done() for one in step) for step in steps]
        return max(sum(made) - 1, 0)

    @property
    def num_readers(self) -> int:
        """Readers that steps are made for."""
        return len(self._readers)

    def add(self, reader: Reader) -> None:
        """Make steps for one more reader, too."""
        with self._lock:
            self._readers[reader] = None

    def remove(self, reader: Reader) -> None:
        """Make no more for a reader."""
        with self._lock:
            self._readers.pop(reader, None)

    def get(self, position: Position, reader: Reader, timeout_s: float) -> T:
        """Return where a reader's part of the step that begins at a position is laid out.

        Raises:
            ValueError: what planner or loader say of the data or the step.
            TimeoutError: it is not made in time.
        """
        made, is_late = self._wait(position, reader, timeout_s)
        if is_late and made.slowest is not None:
            self.figures.waited_for[made.slowest] += 1
        self._expect(made.after.knowing(position), self._steps_ahead)
        return made.steps[reader]

    def crew(self, position: Position, reader: Reader, timeout_s: float) -> Crew:
        """Return who served the sources when a reader's step that begins at a position was made.

        Raises:
            ValueError: what planner or loader say of the data or the step.
            TimeoutError: it is not made in time.
        """
        return self._wait(position, reader, timeout_s)[0].crew

    def _wait(self, position: Position, reader: Reader, timeout_s: float) -> tuple[_Made[T], bool]:
        """A step, once it is made, and whether it was not when it was asked for."""
        with self._awaited(position):
            future = self._made(position, reader)
            is_late = not future.done()
            try:
                failure = future.exception(timeout_s)
            except TimeoutError:
                raise TimeoutError(
                    f"step {position.steps + 1} is not ready after {timeout_s:g} s: see the log of "
                    "the data plane for what it waits for"
                ) from None
            except CancelledError:
                raise RuntimeError("the constructor ends, nothing more is made") from None
            if failure is not None:
                self._forget(position, future)
                raise failure
        return future.result(), is_late

    def close(self) -> None:
        """End all threads and drop all steps; what is being fetched ends by its own time limit."""
        with self._lock:
            self._is_closed = True
            dropped = list(self._steps.values())
            self._steps.clear()
        self._makers.shutdown(wait=False, cancel_futures=True)
        self._fetchers.shutdown(wait=False, cancel_futures=True)
        self._drop(dropped)

    @contextmanager
    def _awaited(self, position: Position) -> Iterator[None]:
        """In the block a step is not dropped, however far others are."""
        key = position.key()
        with self._lock:
            self._num_waiting[key] += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_waiting[key] -= 1
                self._num_waiting += Counter()  # without those that nobody waits for

    def _forget(self, position: Position, failed: Future[_Made[T]]) -> None:
        """Who asks again shall not hear of the same failure."""
        with self._lock:
            making = self._steps.get(position.key(), {})
            for one in [one for one, its in making.items() if its is failed]:
                del making[one]

    def _made(self, position: Position, reader: Reader | None = None) -> Future[_Made[T]]:
        """A step, made before or soon, for a reader, and with it for all that lack it; or for any.

        Steps of positions that were asked for longest ago are dropped, but for those that somebody
        waits for.
        """
        with self._lock:
            making = self._steps.setdefault(position.key(), {})
            found = next(iter(making.values()), None) if reader is None else making.get(reader)
            if found is None:
                wanted = self._readers if reader is None else {**self._readers, reader: None}
                readers = tuple(one for one in wanted if one not in making)
                found = self._makers.submit(self._make, position, readers)
                making.update(dict.fromkeys(readers, found))
            num_over = max(len(self._steps) - self._steps_ahead - 2, 0)
            old = [key for key in list(self._steps)[:-1] if not self._num_waiting[key]]
            dropped = [self._steps.pop(key) for key in old[:num_over]]
        self._drop(dropped)
        return found

    def _drop(self, steps: Sequence[Mapping[Reader, Future[_Made[T]]]]) -> None:
        def let_go(done: Future[_Made[T]]) -> None:
            if not done.cancelled() and done.exception() is None:
                for one in done.result().steps.values():
                    self._let_go(one)

        for one in steps:
            for future in dict.fromkeys(one.values()):
                future.cancel()
                future.add_done_callback(let_go)

    def _expect(self, position: Position, count: int) -> None:
        if not count or not self._readers or self._is_closed or not position.is_decidable:
            return

        def go_on(done: Future[_Made[T]]) -> None:
            if not done.cancelled() and done.exception() is None:
                after = done.result().after.knowing(position)
                self._expect(after, count - 1)

        self._made(position).add_done_callback(go_on)

    def _make(self, position: Position, readers: Sequence[Reader]) -> _Made[T]:
        began = time.monotonic()
        ranks = sorted({one.hdp_rank for one in readers})
        answer = self._ask_planner(position, ranks)
        if answer.epoch < self._epoch:
            answer = self._ask_planner(position, ranks)  # the one that has taken over
        if answer.epoch < self._epoch:
            raise StaleAnswerError(
                f"a planner of epoch {answer.epoch} has answered, expected {self._epoch} or later"
            )
        self._epoch = answer.epoch
        self.num_loaders = len(set().union(*answer.loaders.values()))
        shares = dict(zip(ranks, answer.shares, strict=True))
        reading = {
            (one.hdp_rank, one.num_further) for one in readers if one.reads_tokens or one.reads_mask
        }
        pieces = [pieces_of(shares[rank], further) for rank, further in sorted(reading)]
        planned = time.monotonic()
        fetched, slowest = self._fetch(pieces, answer)
        for name in fetched.lost.keys() - answer.totals.without.keys():
            self._tell_planner(name, fetched.lost[name])
        if time.monotonic() - planned < planned - began:
            slowest = None  # it was the planner that took longer
        steps = {}
        for one in readers:
            step = fetched.step(answer.totals, shares[one.hdp_rank], one)
            steps[one] = self._lay_out(replace(step, planned=answer.planned))
        self.figures.steps += 1
        crew = Crew(loaders=answer.loaders, num_serving=answer.num_serving)
        return _Made(answer.totals.after, steps, slowest, crew)

    def _fetch(self, of_ranks: Sequence[Pieces], answer: Answer) -> tuple[Fetched, str | None]:
        """Ask the sources' loaders for all that the node's ranks read, each piece once.

        Returns:
            What they gave, and the source that was waited for last.
        """
        columns = [
            np.concatenate([getattr(one, name) for one in of_ranks] or [np.zeros(0, np.int64)])
            for name in ("sources", "rows", "starts", "counts", "num_labelled")
        ]
        sources, rows = columns[:2]
        fetched, slowest = Fetched(self._names), None
        asked: list[tuple[int, Wanted, Future[Loaded]]] = []
        for source in np.unique(sources).tolist():
            name = self._names[source]
            if name in self._failed:
                fetched.lost[name] = self._failed[name]
                continue
            loaders, serving = answer.loaders[name], max(answer.num_serving[name], 1)
            turns = turns_of(rows, serving)
            for turn in range(serving):
                mine = (sources == source) & (turns == turn)
                if mine.any():
                    wanted = Wanted(*(column[mine] for column in columns[1:]))
                    order = (*loaders[turn:], *loaders[:turn])
                    future = self._fetchers.submit(self._ask_loader, name, order, wanted)
                    asked.append((source, wanted, future))
        for source, wanted, future in asked:
            name = self._names[source]
            is_late = not future.done()
            try:
                loaded = future.result()
            except FAILURES as error:
                if name not in self._may_fail:
                    raise
                fetched.lost[name] = self._failed.setdefault(name, why_of(error))
                continue
            slowest = name if is_late else slowest
            fetched.add(source, wanted, loaded)
            self.figures.fetched_bytes += loaded.num_bytes
        return fetched, slowest


@dataclass(frozen=True)
class _Made(Generic[T]):
    """A step as the node's readers get it."""

    after: Position
    steps: dict[Reader, T]
    slowest: str | None
    """The source whose tokens came last."""
    crew: Crew

"""A constructor: fetches what the ranks of its node read of a step, once, and lays it out."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_hdp.data.index_file import Int64Array
from megatron_hdp.data.mixture import Position
from megatron_hdp.data.steps import Pieces, RankStep, Reader, pieces_of, read_step
from megatron_hdp.data_plane.roles.loading import Loaded, Wanted
from megatron_hdp.data_plane.roles.planning import Answer

AskPlanner = Callable[[Position, Sequence[int]], Answer]
"""For the shares of HDP ranks in the step that begins at a position; blocks."""
AskLoader = Callable[[int, Wanted], Loaded]
"""For pieces of a source, given by its index; blocks, and several threads call it."""

BoolArray = npt.NDArray[np.bool_]


class StaleAnswerError(RuntimeError):
    """A planner has answered that another one has replaced."""


@dataclass
class ConstructorFigures:
    """What a constructor has done since it began."""

    steps: int = 0
    fetched_bytes: int = 0
    slice_bytes: int = 0
    """Of the tokens of the slices that the node's ranks hold, in the loaders' integers."""


class ConstructingService:
    """Makes the steps of one split for the ranks of one node.

    Steps are made in the order of their positions, `steps_ahead` of them before they are asked for.
    """

    def __init__(self, ask_planner: AskPlanner, ask_loader: AskLoader, *, steps_ahead: int) -> None:
        """Make steps by asking others.

        Args:
            ask_planner: for shares.
            ask_loader: for tokens.
            steps_ahead: steps that are made before they are asked for.
        """
        self._ask_planner = ask_planner
        self._ask_loader = ask_loader
        self._steps_ahead = steps_ahead
        self._lock = threading.Lock()
        self._readers: dict[Reader, None] = {}
        self._steps: OrderedDict[tuple[object, ...], Future[_Made]] = OrderedDict()
        self._makers = ThreadPoolExecutor(1, thread_name_prefix="make")
        self._fetchers = ThreadPoolExecutor(16, thread_name_prefix="fetch")
        self._epoch = 0
        self.figures = ConstructorFigures()

    @property
    def num_ahead(self) -> int:
        """Steps that are made, beside the one that was asked for last."""
        with self._lock:
            return max(sum(one.done() for one in self._steps.values()) - 1, 0)

    def add(self, reader: Reader) -> None:
        """Make steps for one more reader; steps made before lack it and are made again."""
        with self._lock:
            if reader not in self._readers:
                self._readers[reader] = None
                self._steps.clear()

    def remove(self, reader: Reader) -> None:
        """Make no more for a reader."""
        with self._lock:
            self._readers.pop(reader, None)

    def forget(self) -> None:
        """Drop the steps that were made: another order of the data holds from now on."""
        with self._lock:
            self._steps.clear()

    def get(self, position: Position, reader: Reader, timeout_s: float) -> RankStep:
        """Return a reader's part of the step that begins at a position.

        Raises:
            ValueError: what planner or loader say of the data or the step.
            TimeoutError: it is not made in time.
        """
        made = self._made(position).result(timeout_s)
        self._expect(made.after, self._steps_ahead)
        return made.steps[reader]

    def expect(self, position: Position) -> None:
        """Begin to make the step that begins at a position, and those behind it."""
        self._expect(position, self._steps_ahead)

    def close(self) -> None:
        """End all threads; what is being fetched ends by its own time limit."""
        self._makers.shutdown(wait=False, cancel_futures=True)
        self._fetchers.shutdown(wait=False, cancel_futures=True)

    def _made(self, position: Position) -> Future[_Made]:
        with self._lock:
            key = position.key()
            future = self._steps.get(key)
            if future is None:
                readers = tuple(self._readers)
                future = self._makers.submit(self._make, position, readers)
                self._steps[key] = future
            while len(self._steps) > self._steps_ahead + 2:
                self._steps.popitem(last=False)
            return future

    def _expect(self, position: Position, count: int) -> None:
        if not count:
            return

        def go_on(done: Future[_Made]) -> None:
            if not done.cancelled() and done.exception() is None:
                self._expect(done.result().after, count - 1)

        self._made(position).add_done_callback(go_on)

    def _make(self, position: Position, readers: Sequence[Reader]) -> _Made:
        ranks = sorted({one.hdp_rank for one in readers})
        answer = self._ask_planner(position, ranks)
        if answer.epoch < self._epoch:
            raise StaleAnswerError(
                f"a planner of epoch {answer.epoch} has answered, expected {self._epoch} or later"
            )
        self._epoch = answer.epoch
        shares = dict(zip(ranks, answer.shares, strict=True))
        reading = {one.hdp_rank for one in readers if one.reads_tokens or one.reads_mask}
        fetched = self._fetch([pieces_of(shares[rank]) for rank in ranks if rank in reading])
        steps = {
            one: read_step(answer.totals, shares[one.hdp_rank], one, fetched) for one in readers
        }
        self.figures.steps += 1
        return _Made(answer.totals.after, steps)

    def _fetch(self, of_ranks: Sequence[Pieces]) -> _Fetched:
        """Ask each source's loaders once for all that the node's ranks read of it."""
        columns = [
            np.concatenate([getattr(one, name) for one in of_ranks] or [np.zeros(0, np.int64)])
            for name in ("sources", "rows", "starts", "counts", "num_labelled")
        ]
        sources = columns[0]
        asked: list[tuple[int, Wanted, Future[Loaded]]] = []
        for source in np.unique(sources).tolist():
            wanted = Wanted(*(column[sources == source] for column in columns[1:]))
            future = self._fetchers.submit(self._ask_loader, source, wanted)
            asked.append((source, wanted, future))
        fetched = _Fetched()
        for source, wanted, future in asked:
            loaded = future.result()
            fetched.add(source, wanted, loaded)
            self.figures.fetched_bytes += loaded.num_bytes
            self.figures.slice_bytes += wanted.num_tokens * loaded.tokens.itemsize
        return fetched


@dataclass(frozen=True)
class _Made:
    """A step as the node's readers get it."""

    after: Position
    steps: dict[Reader, RankStep]


class _Fetched:
    """Pieces that were fetched, as a `TokenSource`."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int, int], tuple[Int64Array, BoolArray]] = {}

    def add(self, source: int, wanted: Wanted, loaded: Loaded) -> None:
        """Take what a loader has answered."""
        tokens = loaded.tokens.astype(np.int64)
        num_labels = int(wanted.num_labelled.sum())
        trained = np.ones(num_labels, dtype=np.bool_)
        if loaded.trained is not None:
            trained = np.unpackbits(loaded.trained, count=num_labels).view(np.bool_)
        ends, label_ends = np.cumsum(wanted.counts), np.cumsum(wanted.num_labelled)
        if len(tokens) != (ends[-1] if len(ends) else 0):
            raise RuntimeError(
                f"a loader of source {source} sent {len(tokens):,} tokens, expected {ends[-1]:,}"
            )
        for i, (row, start) in enumerate(
            zip(wanted.rows.tolist(), wanted.starts.tolist(), strict=True)
        ):
            here = slice(int(ends[i] - wanted.counts[i]), int(ends[i]))
            labels = slice(int(label_ends[i] - wanted.num_labelled[i]), int(label_ends[i]))
            self._found[source, row, start] = tokens[here], trained[labels]

    def tokens(self, source: int, row: int, start: int, count: int) -> Int64Array:
        found: Int64Array = self._found[source, row, start][0]
        assert len(found) == count, "another piece was fetched than is read"
        return found

    def is_trained(self, source: int, row: int, start: int, stop: int) -> BoolArray:
        found: BoolArray = self._found[source, row, start][1]
        assert len(found) == stop - start, "another piece was fetched than is read"
        return found

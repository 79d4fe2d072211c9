"""Has the pictures that a rank encodes decoded by their sources' loaders, and lays them out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from megatron_hdp.arrays import ByteArray, Int64Array
from megatron_hdp.data.media import Decoded
from megatron_hdp.data_plane.roles.loading import WantedItems, turns_of

T = TypeVar("T")

AskItems = Callable[[str, Sequence[str], WantedItems], list[Decoded]]
"""For pictures of a source, by name, of these loaders: the first, or another if that fails; blocks,
and several threads call it."""

_BLOCK_BYTES = 2**21  # of patches that a loader sends at once: Ray's store has 256 MiB
_THREADS = 8


@dataclass(frozen=True, kw_only=True)
class Crew:
    """Who serves the sources; see `Answer`."""

    loaders: Mapping[str, tuple[str, ...]]
    num_serving: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class RankItems:
    """The items of a step that a rank encodes, ``[n]`` each; see `data.steps.WantedItem`."""

    sources: tuple[int, ...]
    rows: tuple[int, ...]
    places: tuple[int, ...]
    num_bytes: tuple[int, ...]
    """Of each one's values."""


@dataclass
class LaidOut(Generic[T]):
    """Where decoded items lie."""

    blocks: list[tuple[T, list[int]]] = field(default_factory=list)
    """Each with the items in it, one behind another, by their places in what was asked for."""
    damages: dict[int, str] = field(default_factory=dict)
    """Why others are in none, by the same places."""


class DecodingService(Generic[T]):
    """Fetches pictures block by block; what it has laid out belongs to who asked."""

    def __init__(
        self,
        names: Sequence[str],
        ask: AskItems,
        lay_out: Callable[[Sequence[ByteArray]], T],
        let_go: Callable[[T], None],
    ) -> None:
        """Fetch from the loaders of sources of these names.

        Args:
            names: of the sources.
            ask: for pictures.
            lay_out: puts some where a rank finds them.
            let_go: frees what was laid out.
        """
        self._names = tuple(names)
        self._ask, self._lay_out, self._let_go = ask, lay_out, let_go
        self._fetchers = ThreadPoolExecutor(_THREADS, thread_name_prefix="decode")

    def get(self, wanted: RankItems, crew: Crew) -> LaidOut[T]:
        """Return where pictures lie, once all of them are decoded.

        Raises:
            ValueError: what a loader says of the data.
        """
        found = LaidOut[T]()
        asked = [self._begin(wanted, crew, block) for block in _blocks(wanted, crew, self._names)]
        try:
            for block, future in asked:
                laid_out, damages = future.result()
                found.damages |= damages
                if laid_out is not None:
                    found.blocks.append((laid_out, [i for i in block if i not in damages]))
        except BaseException:
            for _, future in asked:
                future.cancel()
                future.add_done_callback(self._drop)
            raise
        return found

    def close(self) -> None:
        """End all threads; what is being fetched ends by its own time limit."""
        self._fetchers.shutdown(wait=False, cancel_futures=True)

    def _begin(
        self, wanted: RankItems, crew: Crew, block: list[int]
    ) -> tuple[list[int], Future[tuple[T | None, dict[int, str]]]]:
        name = self._names[wanted.sources[block[0]]]
        rows, places = (np.array(one)[block] for one in (wanted.rows, wanted.places))
        loaders, serving = crew.loaders[name], max(crew.num_serving[name], 1)
        turn = int(turns_of(rows[:1], serving)[0])
        order = (*loaders[turn:], *loaders[:turn])
        sizes = [wanted.num_bytes[i] for i in block]

        def fetch() -> tuple[T | None, dict[int, str]]:
            pictures = self._ask(name, order, WantedItems(rows, places))
            _require_sizes(name, pictures, sizes)
            damages = {
                i: one for i, one in zip(block, pictures, strict=True) if isinstance(one, str)
            }
            whole = [one for one in pictures if not isinstance(one, str)]
            return self._lay_out(whole) if whole else None, damages

        return block, self._fetchers.submit(fetch)

    def _drop(self, done: Future[tuple[T | None, dict[int, str]]]) -> None:
        if not done.cancelled() and done.exception() is None:
            laid_out = done.result()[0]
            if laid_out is not None:
                self._let_go(laid_out)


def _blocks(wanted: RankItems, crew: Crew, names: Sequence[str]) -> Iterator[list[int]]:
    """Pictures that one loader is asked for at once: neighbours of a source, so many bytes."""
    sources, rows = np.array(wanted.sources, dtype=np.int64), np.array(wanted.rows, dtype=np.int64)
    serving = np.array([max(crew.num_serving[one], 1) for one in names], dtype=np.int64)
    turns: Int64Array = turns_of(rows, 1)
    for source in np.unique(sources).tolist():
        here = sources == source
        turns[here] = turns_of(rows[here], int(serving[source]))
    block: list[int] = []
    key, size = (-1, -1), 0
    for i in np.lexsort((np.array(wanted.places), rows, turns, sources)).tolist():
        at, num_bytes = (int(sources[i]), int(turns[i])), wanted.num_bytes[i]
        if block and (at != key or size + num_bytes > _BLOCK_BYTES):
            yield block
            block, size = [], 0
        block.append(i)
        key, size = at, size + num_bytes
    if block:
        yield block


def _require_sizes(name: str, found: Sequence[Decoded], sizes: Sequence[int]) -> None:
    for one, size in zip(found, sizes, strict=True):
        if not isinstance(one, str) and one.nbytes != size:
            raise RuntimeError(
                f"a loader of '{name}' sent a picture of {one.nbytes:,} bytes, expected {size:,}"
            )

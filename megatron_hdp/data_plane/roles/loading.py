"""A source loader: reads, decodes and counts, for one source, what constructors ask for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from megatron_hdp.arrays import ByteArray, Int64Array
from megatron_hdp.data.media import Decoded
from megatron_hdp.data.mixture import MediaSource, Source

_BLOCK = 64  # rows


@dataclass(frozen=True)
class Wanted:
    """Pieces of one source's rows, ``[n]`` each; see `data.steps.Pieces`."""

    rows: Int64Array
    starts: Int64Array
    counts: Int64Array
    num_labelled: Int64Array

    @property
    def num_tokens(self) -> int:
        """Tokens of all pieces."""
        return int(self.counts.sum())


@dataclass(frozen=True)
class WantedItems:
    """Items of one source's rows, ``[n]`` each; see `data.steps.WantedItem`."""

    rows: Int64Array
    places: Int64Array


@dataclass(frozen=True)
class Loaded:
    """Their tokens, one piece after another."""

    tokens: npt.NDArray[np.integer]
    """In the narrowest integers that hold them."""
    trained: ByteArray | None
    """A bit for each labelled token, one piece after another; None: all of them are trained."""

    @property
    def num_bytes(self) -> int:
        """What it takes to send."""
        return self.tokens.nbytes + (0 if self.trained is None else self.trained.nbytes)


@dataclass
class LoaderFigures:
    """What one loader has done since it began."""

    tokens: int = 0
    busy_s: float = 0.0
    """In which it worked at one request or several, up to now."""


class LoadingService:
    """One opened source. It keeps nothing that a step depends on, so any other can take its place.

    Calls may come from several threads.
    """

    def __init__(self, source: Source) -> None:
        """Serve an opened source."""
        self._source = source
        self._lock = threading.Lock()
        self._figures = LoaderFigures()
        self._num_running = 0
        self._begun = 0.0  # when it last began to work

    @property
    def figures(self) -> LoaderFigures:
        """What it has done, with the part of what it is doing now."""
        with self._lock:
            now_s = time.perf_counter() - self._begun if self._num_running else 0.0
            return replace(self._figures, busy_s=self._figures.busy_s + now_s)

    def lengths(self, rows: Int64Array) -> Int64Array:
        """Return tokens of rows; text that has none yet is tokenised, and kept for a while."""
        with self._working():
            return self._source.lengths(rows)

    def num_trained(self, rows: Int64Array, starts: Int64Array, stops: Int64Array) -> Int64Array:
        """Return of the labelled tokens ``[start, stop)`` of rows those whose label is trained."""
        with self._working():
            return self._source.num_trained(rows, starts, stops)

    def load(self, wanted: Wanted) -> Loaded:
        """Read pieces.

        Raises:
            ValueError: the data are not what they were when they were opened.
        """
        with self._working():
            loaded = self._load(wanted)
            with self._lock:
                self._figures.tokens += wanted.num_tokens
            return loaded

    def decode(self, wanted: WantedItems) -> list[Decoded]:
        """Read and decode pictures.

        Raises:
            ValueError: the source has none, or a file cannot be read.
        """
        source = self._source
        if not isinstance(source, MediaSource):
            raise ValueError(
                f"found a question for pictures of source '{source.name}', expected tokens alone: "
                "it has no media"
            )
        places = zip(wanted.rows.tolist(), wanted.places.tolist(), strict=True)
        with self._working():
            return [source.item(row, place).decoded() for row, place in places]

    def _load(self, wanted: Wanted) -> Loaded:
        self._source.lengths(np.unique(wanted.rows))  # text is decoded together, not row by row
        tokens = np.empty(wanted.num_tokens, dtype=np.int64)
        trained = np.empty(int(wanted.num_labelled.sum()), dtype=np.bool_)
        at = label_at = 0
        pieces = zip(
            wanted.rows.tolist(),
            wanted.starts.tolist(),
            wanted.counts.tolist(),
            wanted.num_labelled.tolist(),
            strict=True,
        )
        for row, start, count, num_labelled in pieces:
            tokens[at : at + count] = self._source.tokens(row, start, count)
            trained[label_at : label_at + num_labelled] = self._source.is_trained(
                row, start, start + num_labelled
            )
            at += count
            label_at += num_labelled
        return Loaded(_narrow(tokens), None if trained.all() else np.packbits(trained))

    @contextmanager
    def _working(self) -> Iterator[None]:
        """A request, counted while it runs: one that takes long is no idle loader."""
        with self._lock:
            if not self._num_running:
                self._begun = time.perf_counter()
            self._num_running += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_running -= 1
                if not self._num_running:
                    self._figures.busy_s += time.perf_counter() - self._begun


def turns_of(rows: Int64Array, num_serving: int) -> Int64Array:
    """Return for each row which of a source's loaders reads it; neighbours are read together."""
    return rows // _BLOCK % max(num_serving, 1)


def _narrow(tokens: Int64Array) -> npt.NDArray[np.integer]:
    """Return the same numbers in two or four bytes each, where they fit."""
    for kind in (np.uint16, np.int32):
        limits = np.iinfo(kind)
        if not len(tokens) or (tokens.min() >= limits.min and tokens.max() <= limits.max):
            return tokens.astype(kind)
    return tokens

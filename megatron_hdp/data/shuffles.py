"""In which order an epoch draws the rows of a table: one class for each version of the order.

A run keeps the version that it began with, or it would repeat and skip sequences. So what a version
computes never changes; another order is another version.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from megatron_hdp.arrays import Int64Array
from megatron_hdp.data.extension import _order

_CACHED_EPOCHS = 2


class Shuffle(Protocol):
    """An order of the rows for every epoch."""

    def rows(self, epoch: int, first: int, count: int) -> Int64Array:
        """Return the rows at ``count`` positions of an epoch, from position ``first`` on."""
        ...


class SortedDraws:
    """Version 1: each epoch's permutation is kept, as what sorts random draws.

    It takes 16 bytes a row while it sorts, 8 a row and epoch later, and seconds for 50M rows.
    """

    def __init__(self, num_rows: int, seed: int, source: int = 0) -> None:
        """Set what decides the orders; there was one source, whose key is 0."""
        assert source == 0, source
        self._num_rows = num_rows
        self._seed = seed
        self._kept: dict[int, Int64Array] = {}

    def rows(self, epoch: int, first: int, count: int) -> Int64Array:
        """Return the rows at ``count`` positions of an epoch, from position ``first`` on."""
        if epoch not in self._kept:
            while len(self._kept) >= _CACHED_EPOCHS:
                del self._kept[next(iter(self._kept))]
            self._kept[epoch] = self._permutation(epoch)
        return self._kept[epoch][first : first + count]

    def _permutation(self, epoch: int) -> Int64Array:
        # numpy keeps a bit generator's stream across releases but not Generator.permutation's:
        # sorting raw draws gives the same steps after a numpy upgrade. The low bits of each draw
        # become its index, which makes all keys distinct and the sort cheaper than an argsort.
        generator = np.random.Philox(np.random.SeedSequence([self._seed, epoch]))
        index_bits = np.uint64((1 << (self._num_rows - 1).bit_length()) - 1)
        keys = generator.random_raw(self._num_rows) & ~index_bits
        keys |= np.arange(self._num_rows, dtype=np.uint64)
        keys.sort()
        keys &= index_bits
        return keys.view(np.int64)


class Feistel:
    """Version 2: a row is computed from its position, with no memory (``csrc/data``).

    Of several sources that are drawn from, each has orders of its own.
    """

    def __init__(self, num_rows: int, seed: int, source: int = 0) -> None:
        """Set what decides the orders; ``source`` is a key of the source among several."""
        self._num_rows = num_rows
        self._seed = seed
        self._source = source

    def rows(self, epoch: int, first: int, count: int) -> Int64Array:
        """Return the rows at ``count`` positions of an epoch, from position ``first`` on."""
        return _order.epoch_rows(
            first,
            count,
            num_rows=self._num_rows,
            seed=self._seed,
            source=self._source,
            epoch=epoch,
        )


_VERSIONS: dict[int, Callable[[int, int, int], Shuffle]] = {1: SortedDraws, 2: Feistel}
LATEST_ORDER = max(_VERSIONS)
"""The version of runs that begin now."""


def shuffle_of(version: int, num_rows: int, seed: int, source: int = 0) -> Shuffle:
    """Return the orders of a table of ``num_rows`` rows in a version, for a key of its source.

    Raises:
        ValueError: this release does not know the version.
    """
    if version not in _VERSIONS:
        raise ValueError(
            f"version {version} of the order of the data, expected 1 to {LATEST_ORDER}: a newer "
            "release of megatron_hdp made it, install that one"
        )
    return _VERSIONS[version](num_rows, seed, source)

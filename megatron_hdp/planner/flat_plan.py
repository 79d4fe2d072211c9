"""A plan as flat arrays, one entry of each offset array a micro-batch; not yet checked."""

import bisect
import hashlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from megatron_hdp.arrays import AnyArray, BoolArray, Float64Array, Int32Array, Int64Array

PIECE = 2**17
"""Entries of arrays that are worked on together, so that they stay in a core's cache."""

Rule = Literal["cover", "fit", "order", "shape"]


class PlanError(ValueError):
    """A plan that breaks a rule: ``rule`` is "cover", "fit", "order" or "shape"."""

    def __init__(self, rule: Rule, message: str) -> None:
        super().__init__(f"plan breaks rule '{rule}': {message}")
        self.rule = rule
        self.message = message

    def __reduce__(self) -> tuple[Any, ...]:
        return PlanError, (self.rule, self.message)


@dataclass(frozen=True)
class MicroBatch:
    """What a set of ranks runs together."""

    ranks: tuple[int, ...]
    """HDP ranks in ring order."""
    sequences: tuple[int, ...]
    """Sequences sharded over all of the ranks."""
    local: Mapping[int, tuple[int, ...]]
    """Whole sequences on one member, by its rank."""
    offload_ratio: float
    """Share of the activations that goes to host memory."""


def frozen(values: ArrayLike, dtype: type[np.generic]) -> AnyArray:
    """The values as an array that nobody can write to: itself if it is one, else a copy."""
    if isinstance(values, np.ndarray) and values.dtype == dtype and values.flags.c_contiguous:
        is_view = isinstance(values.base, np.ndarray)  # perhaps of one that can be written to
        if not values.flags.writeable and not is_view:
            return values
    array = np.array(values, dtype=dtype, order="C", copy=True)
    array.setflags(write=False)
    return array


def pieces(*offsets: Int64Array) -> Iterator[slice]:
    """Cuts the micro-batches into runs, so that work on millions takes the memory of one run.

    In each run the micro-batches own about `PIECE` entries of all the arrays together to which
    the offsets belong; a single one may own more.
    """

    def num_entries(m: int) -> int:
        """Of the first micro-batches."""
        return sum(int(array[m]) for array in offsets)

    last = len(offsets[0]) - 1
    cuts = {0, last}
    for wanted in range(PIECE, num_entries(last), PIECE):
        cuts.add(bisect.bisect_left(range(last), wanted, key=num_entries))
    yield from itertools.starmap(slice, itertools.pairwise(sorted(cuts)))


def span_of(offsets: Int64Array, run: slice) -> slice:
    """The entries that a run of micro-batches owns."""
    return slice(int(offsets[run.start]), int(offsets[run.stop]))


def counts_of(offsets: Int64Array, run: slice) -> Int64Array:
    """How many entries each of these micro-batches owns."""
    found: Int64Array = np.diff(offsets[run.start : run.stop + 1])
    return found


def owners_of(offsets: Int64Array, run: slice) -> Int64Array:
    """The micro-batch of each of these entries, counted from the run's first."""
    found = counts_of(offsets, run)
    return np.repeat(np.arange(len(found)), found)


@dataclass(frozen=True, eq=False)
class FlatPlan:
    """Every micro-batch of one global batch, in one global launch order; immutable.

    Sequence ids are indices into ``lengths``. Micro-batch m owns the entries from ``x_offsets[m]``
    to ``x_offsets[m + 1]`` of the array x. Two plans are the same when their fingerprints are.
    """

    num_ranks: int
    """HDP ranks."""
    tokens_per_rank: int
    """Capacity C."""
    strategy: str
    """What made it."""
    lengths: Int64Array
    """Tokens of each sequence of the global batch."""
    rank_offsets: Int64Array
    ranks: Int32Array
    """Rings, in ring order."""
    sequence_offsets: Int64Array
    sequences: Int64Array
    """Sequences sharded over the whole ring."""
    local_offsets: Int64Array
    local_sequences: Int64Array
    """Whole sequences on one member of the ring."""
    local_ranks: Int32Array
    """The member that holds each of them; ascending within a micro-batch."""
    offload_ratios: Float64Array
    """One ratio in [0, 1] a micro-batch."""
    slice_multiple: int = 1
    """A chunk of a sequence is padded to a multiple of this."""
    positions: Int64Array | None = None
    """Place of each micro-batch in the lists of all its ranks, from 0; places between are padding.
    None: it is the next one of each rank."""
    num_parts: Int64Array | None = None
    """Parts in which each micro-batch runs, see ``planner.parts``; None: all run whole."""
    linear_tokens: float = 0.0
    """Where parts are cut: what a token takes besides attention, in keys that it could see."""
    streams: BoolArray | None = None
    """Which micro-batches are streams: parts of equal tokens that are computed again in backward
    and keep only keys and values, the last ones on the host, as many as the offload ratio says;
    None: none is."""
    recomputed: BoolArray | None = None
    """Which micro-batches keep the inputs of layers alone, and are computed again in backward,
    layer by layer; None: none is."""
    recomputed_share: float = 1.0
    """Of its activations what such a micro-batch holds at its fullest."""
    summary: Mapping[str, float] = field(default_factory=dict)
    """Figures for people, by the names of ``serialisation.SUMMARY_KEYS``."""

    def __post_init__(self) -> None:
        for name, dtype in _ARRAYS.items():
            object.__setattr__(self, name, frozen(getattr(self, name), dtype))
        for name, dtype in _OPTIONAL.items():
            if getattr(self, name) is not None:
                object.__setattr__(self, name, frozen(getattr(self, name), dtype))
        if self.num_parts is None or (self.num_parts == 1).all():
            object.__setattr__(self, "num_parts", None)
            object.__setattr__(self, "linear_tokens", 0.0)
        if self.streams is not None and not self.streams.any():
            object.__setattr__(self, "streams", None)
        if self.recomputed is None or not self.recomputed.any():
            object.__setattr__(self, "recomputed", None)
            object.__setattr__(self, "recomputed_share", 1.0)
        object.__setattr__(self, "summary", MappingProxyType(dict(self.summary)))

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of all ranks together."""
        return len(self.rank_offsets) - 1

    @property
    def parts_of_each(self) -> Int64Array:
        """Parts of each micro-batch, 1 of those that run whole."""
        if self.num_parts is None:
            return np.ones(self.num_micro_batches, dtype=np.int64)
        return self.num_parts

    def host_parts_of(self, m: int) -> int:
        """Parts of a stream, the last ones, whose keys and values wait on the host."""
        return round(float(self.offload_ratios[m]) * int(self.parts_of_each[m]))

    @property
    def is_stream(self) -> BoolArray:
        """Of each micro-batch."""
        if self.streams is None:
            return np.zeros(self.num_micro_batches, dtype=np.bool_)
        return self.streams

    @property
    def streams_from_host(self) -> BoolArray:
        """Of each micro-batch, whether it is a stream of which the host has keys and values."""
        return self.is_stream & (self.offload_ratios > 0)

    @property
    def is_recomputed(self) -> BoolArray:
        """Of each micro-batch."""
        if self.recomputed is None:
            return np.zeros(self.num_micro_batches, dtype=np.bool_)
        return self.recomputed

    @property
    def runs_twice(self) -> BoolArray:
        """Of each micro-batch, whether its forward runs once more in backward."""
        return self.is_stream | self.is_recomputed

    def micro_batch(self, m: int) -> MicroBatch:
        """Micro-batch ``m`` of the launch order."""
        if not 0 <= m < self.num_micro_batches:
            raise IndexError(f"micro-batch is {m}; there are {self.num_micro_batches}")
        local: dict[int, list[int]] = {}
        span = slice(self.local_offsets[m], self.local_offsets[m + 1])
        pairs = zip(
            self.local_ranks[span].tolist(), self.local_sequences[span].tolist(), strict=True
        )
        for rank, sequence in pairs:
            local.setdefault(rank, []).append(sequence)
        first, last = self.sequence_offsets[m], self.sequence_offsets[m + 1]
        return MicroBatch(
            ranks=tuple(self.ranks[self.rank_offsets[m] : self.rank_offsets[m + 1]].tolist()),
            sequences=tuple(self.sequences[first:last].tolist()),
            local=MappingProxyType({rank: tuple(ids) for rank, ids in local.items()}),
            offload_ratio=float(self.offload_ratios[m]),
        )

    @cached_property
    def _by_rank(self) -> tuple[Int64Array, Int64Array]:
        """The micro-batches of every rank, rank after rank, and where each rank's begin."""
        micro_batches = np.repeat(np.arange(self.num_micro_batches), np.diff(self.rank_offsets))
        counts = np.bincount(self.ranks, minlength=self.num_ranks)
        sorted_ = micro_batches[np.argsort(self.ranks, kind="stable")]
        sorted_.setflags(write=False)
        return sorted_, np.concatenate([[0], np.cumsum(counts)])

    def micro_batches_of(self, rank: int) -> Int64Array:
        """The micro-batches in which ``rank`` takes part, in launch order."""
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank is {rank}; expected 0 to {self.num_ranks - 1}")
        micro_batches, offsets = self._by_rank
        return micro_batches[offsets[rank] : offsets[rank + 1]]

    def fingerprint(self) -> int:
        """64 bits over everything but the summary, equal across processes and machines."""
        digest = hashlib.blake2b(digest_size=8)
        scalars = [self.num_ranks, self.tokens_per_rank, self.slice_multiple]
        digest.update(" ".join([*map(str, scalars), self.strategy]).encode())
        given = {n: dtype for n, dtype in _OPTIONAL.items() if getattr(self, n) is not None}
        if self.num_parts is not None:
            digest.update(f" {self.linear_tokens!r}".encode())
        if self.recomputed is not None:
            digest.update(f" {self.recomputed_share!r}".encode())
        for name, dtype in (_ARRAYS | given).items():
            array = getattr(self, name)
            digest.update(f"\n{name} {array.size} ".encode())
            digest.update(array.astype(np.dtype(dtype).newbyteorder("<"), copy=False).data)
        return int.from_bytes(digest.digest(), "little")


_ARRAYS: dict[str, type[np.generic]] = {
    "lengths": np.int64,
    "rank_offsets": np.int64,
    "ranks": np.int32,
    "sequence_offsets": np.int64,
    "sequences": np.int64,
    "local_offsets": np.int64,
    "local_sequences": np.int64,
    "local_ranks": np.int32,
    "offload_ratios": np.float64,
}
_OPTIONAL: dict[str, type[np.generic]] = {
    "positions": np.int64,
    "num_parts": np.int64,
    "streams": np.bool_,
    "recomputed": np.bool_,
}

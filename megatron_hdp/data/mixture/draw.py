"""Which sequences form a step: a function of the data, the seed, the schedule and the position.

Neither the number of ranks nor the strategy enters, so a job restarted on another number of ranks
sees the same steps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_hdp.arrays import Int64Array
from megatron_hdp.data.extension import _order
from megatron_hdp.data.mixture.position import Drawn, Position
from megatron_hdp.data.mixture.schedule import ResolvedSchedule, Setting
from megatron_hdp.data.mixture.stream import Pieces, SourceStream

Together = Callable[..., Iterable[Any]]
"""``map``, or the same with several calls at once."""

_UNBOUNDED = 2**62
_SPARE = 1.1  # of the rows that a step is expected to take, so that it seldom looks twice


@dataclass(frozen=True)
class BatchSize:
    """The size of a global batch, in sequences (pairs where both sides are drawn) or in tokens.

    Raises:
        ValueError: not exactly one of them, one below 1, or growth that does not ascend.
    """

    sequences: int | None = None
    """The last size, if it grows."""
    tokens: int | None = None
    """A step takes sequences until the next one would exceed this many; at least one."""
    growth: tuple[tuple[int, int], ...] = ()
    """From how many sequences drawn in steps before on a step has how many; the first from 0 on."""

    def __post_init__(self) -> None:
        sizes = [size for size in (self.sequences, self.tokens) if size is not None]
        if len(sizes) != 1 or sizes[0] < 1:
            raise ValueError(
                f"global batch of {self.sequences} sequences and {self.tokens} tokens: give "
                "exactly one, at least 1 (--global-batch-size or --hdp-global-batch-tokens)"
            )
        starts = [start for start, _ in self.growth]
        if starts and (starts[0] != 0 or starts != sorted(set(starts)) or self.tokens is not None):
            raise ValueError(
                f"sizes of a global batch from these sequences on: found {starts}, expected 0 and "
                "then ever more, without --hdp-global-batch-tokens"
            )
        if any(size < 1 for _, size in self.growth):
            raise ValueError(f"sizes of a global batch: found {self.growth}, expected at least 1")

    def at(self, num_drawn: int) -> int | None:
        """Sequences of the step before which so many were drawn; None where tokens decide."""
        if not self.growth:
            return self.sequences
        starts = [start for start, _ in self.growth]
        return self.growth[bisect_right(starts, num_drawn) - 1][1]


@dataclass(frozen=True)
class Step:
    """The sequences of one global batch, in the order in which they were drawn.

    A sequence is known by its place in these arrays, ``[n]`` each. It lies in one row of its
    source's sequence table and is all of it, unless the schedule wants shorter sequences. The two
    sides of a pair are neighbours.
    """

    sources: Int64Array
    """Index of each one's source."""
    rows: Int64Array
    """Row of the source's table."""
    starts: Int64Array
    """First token, counted from the row's first."""
    lengths: Int64Array
    """Tokens, padding not counted."""
    num_labels: Int64Array
    """Tokens, counted from the first, that have a next one to predict."""
    num_loss_tokens: Int64Array
    """Those of them whose prediction is trained."""
    before: Position
    """Where it begins."""
    after: Position
    """Where the next one begins."""
    max_length: int
    """The schedule's bound of its sequences."""
    weights: tuple[float, ...]
    """The schedule's weights of the sources; of those that have ended, nothing is drawn."""

    def __len__(self) -> int:
        """Return the number of sequences; 0 where every source has ended."""
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return int(self.lengths.sum())


@dataclass(frozen=True)
class MixedSource:
    """A source as it is drawn from."""

    name: str
    stream: SourceStream
    mean_length: float
    """Tokens of a row, or of all of a group, to guess how many of them a step takes."""


class Mixture:
    """Draws global batches from sources, each of which keeps its share."""

    def __init__(
        self,
        sources: Sequence[MixedSource],
        schedule: ResolvedSchedule,
        batch: BatchSize,
        weight_unit: str = "tokens",
        together: Together = map,
        group: int = 1,
    ) -> None:
        """Set what is drawn; ties go to the first source, and weights are shares of the unit.

        Each `group` of neighbouring sequences of a step are drawn, and count, as one.
        ``together`` maps a function over the sources, for those that wait for others at once.
        """
        self.sources = tuple(sources)
        self.schedule = schedule
        self._batch = batch
        self._unit = weight_unit
        self._together = together
        self.group = group

    def step(self, position: Position, weights: Sequence[float] | None = None) -> Step:
        """Return the step that begins at a position; it has no sequence where all have ended.

        Weights, which sum to 1, replace the schedule's.
        """
        setting = self.schedule.at(position)
        if weights is not None:
            setting = replace(setting, weights=tuple(weights))
        return _Draw(self, setting, self._batch, position).step()

    def is_over(self, position: Position, weights: Sequence[float] | None = None) -> bool:
        """Return whether a step that begins at a position would have no sequence."""
        weights = self.schedule.at(position).weights if weights is None else weights
        return all(
            not weight
            or one.name in position.without
            or one.stream.has_ended(position.of(one.name).rows)
            for weight, one in zip(weights, self.sources, strict=True)
        )

    def amounts(self, pieces: Pieces) -> Int64Array:
        """Return what sequences count, in the unit of the weights."""
        if self._unit == "tokens":
            return pieces.lengths
        if self._unit == "loss-tokens":
            return pieces.num_loss_tokens
        return np.ones_like(pieces.lengths)


class _Draw:
    """The drawing of one step."""

    def __init__(
        self, mixture: Mixture, setting: Setting, batch: BatchSize, position: Position
    ) -> None:
        self._mixture = mixture
        self._setting = setting
        self._position = position
        self._batch = batch
        self._drawn = [position.of(one.name) for one in mixture.sources]
        self._weights = self._live(setting.weights)
        self._owed = self._rebased([one.owed for one in self._drawn])
        self._pieces: list[Pieces] = []
        self._used = [0] * len(self._drawn)
        self._order: list[Int64Array] = []
        self._turns: list[Int64Array] = []

    def step(self) -> Step:
        sequences = self._batch.at(self._position.sequences) or _UNBOUNDED
        tokens = self._batch.tokens or _UNBOUNDED
        if any(self._weights):
            counts = self._guess(sequences, tokens)
            self._pieces = list(self._mixture._together(self._take, range(len(counts)), counts))
        must_take = True
        while any(self._weights):
            lengths, amounts, first = self._ready()
            before = list(self._used)
            drawn, turns, self._owed, self._used, needed = _order.mix(
                self._weights,
                self._owed,
                lengths,
                amounts,
                first,
                self._used,
                sequences=sequences,
                tokens=tokens,
                must_take=must_take,
            )
            self._order.append(drawn.astype(np.int64))
            self._turns.append(turns)
            sequences -= len(drawn)
            tokens -= self._tokens_between(before)
            must_take = must_take and not len(drawn)
            if needed < 0:
                break
            self._replenish(needed)
        return self._finished()

    def _live(self, weights: Sequence[float]) -> list[float]:
        """Return weights without those of sources that have ended, whose share the others get.

        One that has failed is not even asked whether it has ended.
        """
        without = self._position.without
        live = [
            0.0 if one.name in without or one.stream.has_ended(drawn.rows) else weight
            for weight, one, drawn in zip(weights, self._mixture.sources, self._drawn, strict=True)
        ]
        total = sum(live)
        return [weight / total for weight in live] if total else live

    def _rebased(self, owed: list[float]) -> list[float]:
        """Return `owed` with what is owed to the sources that are drawn from summing to 0.

        It does not where sources came, went or ended: what they leave is shared out by weight.
        """
        active = [i for i, weight in enumerate(self._weights) if weight]
        rest = sum(owed[i] for i in active)
        if len(active) == 1:
            return [0.0 if i in active else one for i, one in enumerate(owed)]
        return [one - self._weights[i] * rest for i, one in enumerate(owed)]

    def _guess(self, sequences: int, tokens: int) -> list[int]:
        """Return how many rows of each source the step will take, a little more."""
        longest = self._mixture.group * self._setting.max_length
        means = [min(one.mean_length, longest) for one in self._mixture.sources]
        rates = list(self._weights)
        if self._mixture._unit != "sequences":
            rates = [weight / mean for weight, mean in zip(rates, means, strict=True)]
        total = sum(rates)
        per_sequence = sum(rate * mean for rate, mean in zip(rates, means, strict=True)) / total
        expected = min(sequences, tokens / per_sequence)
        guessed = [int(_SPARE * expected * rate / total) + 4 if rate else 0 for rate in rates]
        return [min(count, sequences) for count in guessed]

    def _take(self, i: int, count: int) -> Pieces:
        drawn, stream = self._drawn[i], self._mixture.sources[i].stream
        return stream.pieces(drawn.rows, drawn.offset, count, self._setting.max_length)

    def _ready(self) -> tuple[Int64Array, Int64Array, list[int]]:
        lengths = np.concatenate([one.lengths for one in self._pieces])
        amounts = np.concatenate([self._mixture.amounts(one) for one in self._pieces])
        first = np.cumsum([0, *(len(one) for one in self._pieces)])
        return lengths, amounts, first.tolist()

    def _tokens_between(self, before: list[int]) -> int:
        return sum(
            int(one.lengths[begin:end].sum())
            for one, begin, end in zip(self._pieces, before, self._used, strict=True)
        )

    def _replenish(self, i: int) -> None:
        """Get more of the source whose turn it is, or let it end."""
        pieces, source = self._pieces[i], self._mixture.sources[i]
        if not pieces.is_last:
            num_rows = pieces.stop - self._drawn[i].rows
            if not len(pieces) and num_rows > 2 * source.stream.rows.num_rows:  # a whole epoch
                raise ValueError(
                    f"source '{source.name}': none of its {source.stream.rows.num_rows:,} records "
                    "has a token, expected text: change its path, glob or key"
                )
            self._pieces[i] = self._take(i, 2 * max(len(pieces), num_rows) + 4)
            return
        self._weights[i] = 0.0
        total = sum(self._weights)
        if total:
            self._weights = [weight / total for weight in self._weights]
            self._owed = self._rebased(self._owed)

    def _finished(self) -> Step:
        order = _joined(self._order)
        first = np.cumsum([0, *(len(one) for one in self._pieces)])
        num_drawn = len(order)
        places = first[order] + _joined(self._turns)
        size = self._mixture.group
        if size > 1:
            places = (size * places[:, None] + np.arange(size)).ravel()
            order = np.repeat(order, size)
        names = ("rows", "starts", "lengths", "num_labels", "num_loss_tokens")
        columns = {name: self._column(name, places) for name in names}
        before = self._position
        drawn = {one.name: self._after(i) for i, one in enumerate(self._mixture.sources)}
        after = replace(
            before,
            steps=before.steps + 1,
            sequences=before.sequences + num_drawn,
            tokens=before.tokens + int(columns["lengths"].sum()),
            sources={**before.sources, **drawn},
            costs=None,
        )
        return Step(
            sources=order,
            **columns,
            before=before,
            after=after,
            max_length=self._setting.max_length,
            weights=self._setting.weights,
        )

    def _column(self, name: str, places: Int64Array) -> Int64Array:
        """Return a column of the step, from what its sources had ready one after the other."""
        ready = [getattr(one if one.members is None else one.members, name) for one in self._pieces]
        count = self._mixture.group * sum(self._used)
        return ready[0][:count] if len(ready) == 1 else _joined(ready)[places]

    def _after(self, i: int) -> Drawn:
        drawn = replace(self._drawn[i], owed=self._owed[i])
        if not self._pieces or not self._used[i]:
            return drawn
        pieces, used = self._pieces[i], self._used[i]
        rows, offset = pieces.after(used)
        amount = drawn.amount + int(self._mixture.amounts(pieces)[:used].sum())
        return replace(drawn, rows=rows, offset=offset, amount=amount)


def _joined(parts: Sequence[Int64Array]) -> Int64Array:
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts])

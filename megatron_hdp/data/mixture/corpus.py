"""The opened sources of one split: metadata of their sequences, and their tokens when asked for.

Metadata decide which sequences form a step and never touch a token; tokens are read by whoever
needs them, for a step that is decided.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_hdp.data.index_file import Int64Array
from megatron_hdp.data.mixture.draw import BatchSize, MixedSource, Mixture
from megatron_hdp.data.mixture.mixture_spec import MixtureSpec
from megatron_hdp.data.mixture.stream import SourceStream
from megatron_hdp.data.order import SourceOrder
from megatron_hdp.data.shuffles import LATEST_ORDER, shuffle_of
from megatron_hdp.data.spans import Spans
from megatron_hdp.data.spec import SourceSpec
from megatron_hdp.data.tables import SequenceTable
from megatron_hdp.data.token_file import TokenReader

_SHOWN = 16  # sequences that a message names

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class OpenSource:
    """One source of a split.

    Its rows are those of a run of a sequence table's rows, counted from the first of them.
    """

    spec: SourceSpec
    prefix: str
    """Of its ``.bin/.idx``: as given, or in the cache."""
    table: SequenceTable
    reader: TokenReader
    spans: Spans | None
    """What of its documents is trained; None: every token but the first."""
    long_sequence: str
    bad: int
    """Bad documents that were left out when it was prepared."""
    first_row: int
    num_rows: int

    @property
    def name(self) -> str:
        """What the source is called."""
        return self.spec.name

    def lengths(self, rows: Int64Array) -> Int64Array:
        """Return tokens of rows."""
        return self.table.lengths(rows + self.first_row)

    def num_labels(self, rows: Int64Array, lengths: Int64Array) -> Int64Array:
        """Return tokens of rows of these lengths, from the first, that have a next one."""
        return self.table.num_labels(rows + self.first_row, lengths)

    def num_trained(self, rows: Int64Array, starts: Int64Array, stops: Int64Array) -> Int64Array:
        """Return of the labelled tokens ``[start, stop)`` of rows those whose label is trained."""
        if self.spans is None:
            return stops - starts
        rows = rows + self.first_row
        begins = self.table.starts(rows) + 1  # a label is the token after
        return self.spans.counts(self.table.documents(rows), begins + starts, begins + stops)

    def is_trained(self, row: int, start: int, stop: int) -> BoolArray:
        """Return which of the labelled tokens ``[start, stop)`` of a row have a trained label."""
        if self.spans is None:
            return np.ones(stop - start, dtype=np.bool_)
        rows = np.array([row + self.first_row])
        begin = int(self.table.starts(rows)[0]) + 1
        document = int(self.table.documents(rows)[0])
        return self.spans.mask(document, begin + start, begin + stop)

    def tokens(self, row: int, start: int, count: int) -> Int64Array:
        """Return tokens of a row from its token ``start`` on; the token behind it may be asked."""
        begin = int(self.table.begins(np.array([row + self.first_row]))[0])
        return self.reader.read(begin + start, count)

    def document(self, row: int) -> int:
        """Return the document in which a row lies."""
        return int(self.table.documents(np.array([row + self.first_row]))[0])

    def order(self, key: int) -> SourceOrder:
        """Return what decides the order in which it is drawn, but for what its tokens are.

        Args:
            key: what tells its orders from those of other sources.
        """
        corpus = self.table.corpus
        if self.num_rows != len(self.table):
            corpus = _digest(corpus, self.first_row, self.num_rows)
        return SourceOrder(
            num_sequences=self.num_rows,
            corpus=corpus,
            long_sequence=self.long_sequence,
            version=LATEST_ORDER,
            key=key,
        )

    def contents(self) -> int:
        """Return a fingerprint of samples of its tokens, and of what of them is trained."""
        found = self.reader.fingerprint()
        return (
            found
            if self.spans is None
            else _digest(found, len(self.spans), self.spans.num_trained_tokens)
        )


class Corpus:
    """The sources of one split, in order."""

    def __init__(self, spec: MixtureSpec, sources: Sequence[OpenSource], max_length: int) -> None:
        """Take opened sources.

        Args:
            spec: what the split draws from.
            sources: one for each of the spec's, in its order.
            max_length: ``--seq-length``.

        Raises:
            ValueError: under the policy ``error`` a source has longer rows than a phase allows.
        """
        self.spec = spec
        self.sources = tuple(sources)
        self.schedule = spec.schedule.resolved(self._sizes(), max_length)
        for i, source in enumerate(self.sources):
            bound = self.schedule.least_max_length(i)
            if source.long_sequence == "error" and source.table.longest > bound:
                raise ValueError(
                    f"{spec.origin}: source '{source.name}' has a sequence of "
                    f"{source.table.longest:,} tokens, the schedule allows {bound:,}: give it "
                    "long-sequence truncate or split, or raise max-length"
                )

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that can be drawn."""
        longest = max(one.table.longest for one in self.sources)
        return min(longest, max(one.max_length for one in self.schedule.settings))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the sources."""
        return tuple(one.name for one in self.sources)

    def mixture(self, orders: Mapping[str, SourceOrder], batch: BatchSize, seed: int) -> Mixture:
        """Return what draws this split's steps.

        Args:
            orders: of each source, by name; its version and key are heeded.
            batch: size of a step.
            seed: of the run.
        """
        mixed = [
            MixedSource(
                one.name,
                SourceStream(
                    one,
                    shuffle_of(orders[one.name].version, one.num_rows, seed, orders[one.name].key),
                    splits_long=one.long_sequence == "split",
                    max_epochs=one.spec.max_epochs,
                ),
                one.table.num_tokens / len(one.table),
            )
            for one in self.sources
        ]
        return Mixture(mixed, self.schedule, batch, self.spec.weight_unit)

    def orders(self) -> dict[str, SourceOrder]:
        """Return what decides the order of each source in a run that begins now."""
        alone = len(self.sources) == 1
        return {one.name: one.order(0 if alone else _key(one.name)) for one in self.sources}

    def tokens(self, source: int, row: int, start: int, count: int) -> Int64Array:
        """Return tokens of a source's row from its token ``start`` on.

        Of a sequence whose last token has a label, the token behind it may be asked for.
        """
        return self.sources[source].tokens(row, start, count)

    def is_trained(self, source: int, row: int, start: int, stop: int) -> BoolArray:
        """Return which of the labelled tokens ``[start, stop)`` of a row carry loss."""
        return self.sources[source].is_trained(row, start, stop)

    def words_for(self, sources: Sequence[int], rows: Sequence[int]) -> str:
        """Return what a message calls the documents of some sequences."""
        documents: dict[str, list[int]] = {}
        for source, row in zip(sources[:_SHOWN], rows[:_SHOWN], strict=True):
            one = self.sources[source]
            documents.setdefault(one.prefix, []).append(one.document(row))
        words = [
            f"document{'s' if len(found) > 1 else ''} {', '.join(map(str, found))} of {prefix}"
            for prefix, found in documents.items()
        ]
        more = len(sources) - _SHOWN
        return " and ".join([*words, *([f"{more} more"] if more > 0 else [])])

    def describe(self, i: int, use: str) -> str:
        """Return how many sequences of a source are ``use``, and what became of its documents."""
        source = self.sources[i]
        table, name = source.table, "" if len(self.sources) == 1 else f" of {source.name}"
        bad = f", {source.bad:,} bad and left out" if source.bad else ""
        return (
            f"{source.num_rows:,} sequences{name} {use} (documents: {table.num_empty:,} empty and "
            f"skipped, {table.num_truncated:,} truncated, {table.num_split:,} split{bad})"
        )

    def _sizes(self) -> dict[str, float]:
        """Return the sources' sizes in the unit of the weights."""
        sizes = {}
        for one in self.sources:
            share = one.num_rows / len(one.table)
            if self.spec.weight_unit == "sequences":
                size = float(one.num_rows)
            elif self.spec.weight_unit == "tokens" or one.spans is None:
                size = one.table.num_tokens * share
            else:
                size = one.spans.num_trained_tokens * share
            sizes[one.name] = max(size, 1.0)
        return sizes


def _key(name: str) -> int:
    """Return what tells a source's orders from others': of its name, so that places may change."""
    return _digest(name) or 1


def _digest(*parts: object) -> int:
    """Return 63 bits, the same in every process."""
    found = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(found, "little") >> 1

"""A source of tokens: metadata from its table of sequences, tokens from its ``.bin``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_hdp.arrays import BoolArray, Int64Array
from megatron_hdp.data.mixture.source import Source, digest
from megatron_hdp.data.sides import LABELLED, PAIRS, Sides
from megatron_hdp.data.spans import Spans
from megatron_hdp.data.tables import SequenceTable
from megatron_hdp.data.token_file import TokenReader


@dataclass(frozen=True, kw_only=True)
class TableSource(Source):
    """A source of tokens, whose rows are those of a table of sequences."""

    prefix: str
    """Of its ``.bin/.idx``: as given, or in the cache."""
    table: SequenceTable
    reader: TokenReader
    spans: Spans | None
    """What of its documents is trained; None: every token but the first."""
    num_bad: int
    known_sides: Sides | None = None
    """Of its documents."""

    @property
    def sides(self) -> Sides | None:
        """Which of its documents were preferred."""
        return self.known_sides

    @property
    def bad(self) -> int:
        """Bad documents that were left out when it was prepared."""
        return self.num_bad

    @property
    def longest(self) -> int:
        """Tokens of its longest row."""
        return self.table.facts.longest

    @property
    def mean_length(self) -> float:
        """Tokens of a row on average."""
        return self.table.mean_length

    @property
    def index_bytes(self) -> int:
        """Bytes of the table, and of what says which tokens are trained."""
        spans = 0 if self.spans is None else os.path.getsize(self.spans.path)
        return self.table.num_bytes + spans

    @property
    def private_bytes(self) -> int:
        """Bytes of the table."""
        return self.table.num_bytes

    def lengths(self, rows: Int64Array) -> Int64Array:
        """Return tokens of rows, at least 1."""
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

    def documents(self, rows: Int64Array) -> Int64Array:
        """Return the documents in which rows lie."""
        return self.table.documents(rows + self.first_row)

    def _all_rows(self) -> tuple[int, int]:
        return len(self.table), self.table.facts.corpus

    def contents(self) -> int:
        """Return a fingerprint of samples of its tokens, and of what of them is trained."""
        found = self.reader.fingerprint()
        if self.spans is None:
            return found
        if self.sides is None:
            return digest(found, len(self.spans), self.spans.num_trained_tokens)
        of_spans = len(self.spans), self.spans.num_trained_tokens
        return digest(found, *of_spans, self.sides.kind, self.sides.is_good.tobytes())

    def size(self, unit: str) -> float:
        """Return how large it is, in the unit of the weights."""
        share = self.num_rows / len(self.table)
        if unit == "sequences":
            return float(self.num_rows)
        if unit == "tokens" or self.spans is None:
            return self.table.facts.num_tokens * share
        return self.spans.num_trained_tokens * share

    def words(self, rows: Sequence[int]) -> str:
        """Return what a message calls the documents of rows."""
        documents = ", ".join(str(self.document(row)) for row in rows)
        return f"document{'s' if len(rows) > 1 else ''} {documents} of {self.prefix}"

    def describe(self, use: str, name: str) -> str:
        """Return how many rows are ``use``, and what became of its documents."""
        facts = self.table.facts
        bad = f", {self.bad:,} bad and left out" if self.bad else ""
        kind = None if self.sides is None else self.sides.kind
        what = {None: "sequences", PAIRS: "pairs", LABELLED: "labelled answers"}[kind]
        return (
            f"{self.num_groups:,} {what}{name} {use} (documents: {facts.num_empty:,} empty and "
            f"skipped, {facts.num_truncated:,} truncated, {facts.num_split:,} split{bad})"
        )

"""Records of a source to tokens, some at a time; those decoded last are kept."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_hdp.arrays import BoolArray, Int32Array, Int64Array
from megatron_hdp.data.formats import BadRecord, Record
from megatron_hdp.data.on_the_fly.record_index import RecordIndex
from megatron_hdp.data.prepare import (
    Counts,
    Decoding,
    batches_of,
    conversations_of,
    rendered,
    require_few_bad,
    tokens_of_texts,
)
from megatron_hdp.data.spec import SourceSpec

WINDOW_BYTES = 2**28
_LEAST_JUDGED = 1000  # records, before a share of bad ones means something
_MOST_NAMED = 5
_OVERHEAD_BYTES = 300  # of a row that is kept, beside its arrays


@dataclass(frozen=True)
class Decoded:
    """Records as tokens, ``[n]`` of them in the order in which they were asked for."""

    tokens: Int32Array
    """Of one record after the other."""
    lengths: Int64Array
    """Tokens of each record; 0: it is empty or bad."""
    is_trained: BoolArray | None
    """Of each token whether it is predicted with loss; None: all but the first of each record."""


@dataclass(frozen=True)
class DecodedRow:
    """One record as tokens."""

    tokens: Int32Array
    is_trained: BoolArray | None
    num_trained: int
    """Tokens that are predicted with loss."""

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        mask = 0 if self.is_trained is None else self.is_trained.nbytes
        return self.tokens.nbytes + mask + _OVERHEAD_BYTES


_NOTHING = DecodedRow(np.zeros(0, dtype=np.int32), None, 0)


class Decoder:
    """Decodes the records of one source; several threads may ask at a time.

    What is decoded is kept as long as it fits in a window, so that rows are not decoded again
    between the question how long they are and the one for their tokens. What was used least
    recently leaves first.

    Attributes:
        num_bad: records decoded so far that are none.
    """

    def __init__(
        self,
        spec: SourceSpec,
        index: RecordIndex,
        decoding: Decoding,
        *,
        max_length: int,
        long_sequence: str,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        """Set what is decoded.

        Args:
            spec: of the source; of it the limit of bad records.
            index: its records.
            decoding: what becomes of one.
            max_length: ``--seq-length``.
            long_sequence: of a longer record, ``truncate`` keeps the beginning, ``error`` refuses
                it.
            window_bytes: of decoded rows that are kept.

        Raises:
            ValueError, ModuleNotFoundError: the template or the tokenizer cannot be used.
        """
        self._spec = spec
        self._index = index
        self._recipe = decoding
        self._max_length = max_length
        self._long_sequence = long_sequence
        self._window_bytes = window_bytes
        self._conversations = conversations_of(decoding) if decoding.key is None else None
        self._decoding, self._looking = threading.Lock(), threading.Lock()
        self._kept: OrderedDict[int, DecodedRow] = OrderedDict()
        self._kept_bytes = 0
        self._counts = Counts()

    @property
    def num_bad(self) -> int:
        """Records decoded so far that are none."""
        return self._counts.bad

    def decode(self, rows: Int64Array) -> Decoded:
        """Return the tokens of records; raises as `rows`."""
        found = self.rows(rows)
        masks = [one.is_trained for one in found if one.is_trained is not None]
        is_text = self._conversations is None
        return Decoded(
            tokens=np.concatenate([np.zeros(0, dtype=np.int32), *(one.tokens for one in found)]),
            lengths=lengths_of(found),
            is_trained=None if is_text else np.concatenate([np.zeros(0, dtype=np.bool_), *masks]),
        )

    def rows(self, rows: Int64Array) -> list[DecodedRow]:
        """Return records, decoded now or before, in the order in which they are asked for.

        Raises:
            ChangedFileError: a file is not what it was.
            ValueError: too many records are bad, one is too long under ``error``, a file as a whole
                is damaged.
        """
        wanted = rows.tolist()
        found = self._found(wanted)
        if missing := set(wanted) - found.keys():
            with self._decoding:
                found |= self._found(missing)  # perhaps another thread has decoded them by now
                missing -= found.keys()
                if missing:
                    new = self._decoded(np.array(sorted(missing)), self._counts)
                    self._require_few_bad()
                    found |= new
                    self._keep(new)
        return [found[row] for row in wanted]

    def sample(self, rows: Int64Array) -> list[DecodedRow]:
        """Return records that are only looked at: none is kept, counted or refused as too long."""
        with self._decoding:
            found = self._decoded(np.unique(rows), None)
        return [found[row] for row in rows.tolist()]

    def _found(self, rows: Iterable[int]) -> dict[int, DecodedRow]:
        """Return those of rows that are kept."""
        found = {}
        with self._looking:
            for row in rows:
                if (one := self._kept.get(row)) is not None:
                    self._kept.move_to_end(row)
                    found[row] = one
        return found

    def _keep(self, new: dict[int, DecodedRow]) -> None:
        with self._looking:
            self._kept |= new
            self._kept_bytes += sum(one.num_bytes for one in new.values())
            while self._kept_bytes > self._window_bytes and len(self._kept) > 1:
                self._kept_bytes -= self._kept.popitem(last=False)[1].num_bytes

    def _decoded(self, rows: Int64Array, counts: Counts | None) -> dict[int, DecodedRow]:
        """Read and decode rows, which rise; what is bad or empty is nothing."""
        found = dict.fromkeys(rows.tolist(), _NOTHING)
        good: list[int] = []

        def records() -> Iterator[Record]:
            for row, record in self._index.read(rows):
                if isinstance(record, BadRecord):
                    self._note_bad(record.message, counts)
                else:
                    good.append(row)
                    yield record

        done = 0
        for batch in batches_of(records()):
            numbers = good[done : done + len(batch)]
            done += len(batch)
            if self._conversations is None:
                self._add_texts(batch, numbers, found, counts)
            else:
                self._add_conversations(batch, numbers, found, counts)
        return found

    def _add_texts(
        self,
        batch: Sequence[Record],
        rows: Sequence[int],
        found: dict[int, DecodedRow],
        counts: Counts | None,
    ) -> None:
        tokens = tokens_of_texts(self._recipe, batch)
        ends = np.cumsum(tokens.lengths)
        begins = ends - tokens.lengths
        for row, record, begin, end in zip(
            rows, batch, begins.tolist(), ends.tolist(), strict=True
        ):
            if counts is not None:
                counts.documents += begin < end
                counts.empty += begin == end
            if begin < end:
                ids = self._cut(tokens.ids[begin:end], record, counts)
                found[row] = DecodedRow(ids, None, len(ids) - 1)

    def _add_conversations(
        self,
        batch: Sequence[Record],
        rows: Sequence[int],
        found: dict[int, DecodedRow],
        counts: Counts | None,
    ) -> None:
        assert self._conversations is not None
        for row, record in zip(rows, batch, strict=True):
            documents = rendered(self._conversations, record)
            if isinstance(documents, BadRecord):
                self._note_bad(documents.message, counts)
                continue
            if len(documents) > 1:
                raise ValueError(
                    f"{record.where}: found a row of {len(documents)} conversations, expected one "
                    f"in each row of source '{self._spec.name}', which is tokenised on the fly: "
                    "leave tokenise: on-the-fly out to prepare it"
                )
            if counts is not None:
                counts.documents += 1
            (one,) = documents
            ids = self._cut(one.ids, record, counts)
            mask = np.zeros(len(one.ids), dtype=np.bool_)
            for start, stop in one.spans.tolist():
                mask[start:stop] = True
            mask = mask[: len(ids)].copy()
            found[row] = DecodedRow(ids, mask, int(mask.sum()))

    def _cut(
        self, ids: npt.NDArray[np.integer], record: Record, counts: Counts | None
    ) -> Int32Array:
        """Return a record's tokens, as many as a sequence may have, in memory of their own."""
        if len(ids) > self._max_length and self._long_sequence == "error" and counts is not None:
            raise ValueError(
                f"{record.where} has {len(ids):,} tokens, the context length is "
                f"{self._max_length:,}: give source '{self._spec.name}' long-sequence: truncate, "
                "or raise --seq-length"
            )
        return np.array(ids[: self._max_length], dtype=np.int32)

    def _note_bad(self, message: str, counts: Counts | None) -> None:
        if counts is None:
            return
        if not self._recipe.may_be_bad:
            raise ValueError(message)
        counts.bad += 1
        if len(counts.named) < _MOST_NAMED:
            counts.named.append(message)

    def _require_few_bad(self) -> None:
        counts = self._counts
        if counts.documents + counts.empty + counts.bad >= _LEAST_JUDGED:
            require_few_bad(self._spec, counts)


def lengths_of(rows: Sequence[DecodedRow]) -> Int64Array:
    """Return tokens of decoded rows."""
    return np.fromiter((len(one.tokens) for one in rows), np.int64, len(rows))

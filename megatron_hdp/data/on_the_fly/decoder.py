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
_OVERHEAD_BYTES = 300  # of a row that is kept, beside its arrays

_Ids = tuple[npt.NDArray[np.integer], BoolArray | None]
"""Of a record, and of each whether it is predicted with loss; None: all but the first."""


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
        """Set what is decoded; ``error`` refuses records longer than ``--seq-length``, else cut.

        Raises:
            ValueError, ModuleNotFoundError: the template or the tokenizer cannot be used.
        """
        self._spec = spec
        self._index = index
        self._recipe = decoding
        self._max_length = max_length
        self._long_sequence = long_sequence
        self._window_bytes = window_bytes
        self._chat = conversations_of(decoding) if decoding.key is None else None
        self._decoding, self._looking = threading.Lock(), threading.Lock()
        self._kept: OrderedDict[int, DecodedRow] = OrderedDict()
        self._kept_bytes = 0
        self._counts = Counts()

    @property
    def num_bad(self) -> int:
        """Records decoded so far that are none."""
        return self._counts.bad

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
                    if self._counts.documents + self._counts.bad >= _LEAST_JUDGED:
                        require_few_bad(self._spec, self._counts)
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
        num_bad = 0 if counts is None else counts.bad

        def records() -> Iterator[Record]:
            for row, record in self._index.read(rows):
                if isinstance(record, BadRecord):
                    self._note_bad(record.message, counts)
                else:
                    good.append(row)
                    yield record

        done = 0
        for batch in batches_of(records()):
            decoded = self._of_conversations(batch, counts) if self._chat else self._of_texts(batch)
            for record, (ids, mask) in zip(batch, decoded, strict=True):
                if len(ids):
                    if counts is not None:
                        self._require_short(ids, record)
                    kept = np.array(ids[: self._max_length], dtype=np.int32)  # its own memory
                    mask = None if mask is None else mask[: len(kept)].copy()
                    num_trained = len(kept) - 1 if mask is None else int(mask.sum())
                    found[good[done]] = DecodedRow(kept, mask, num_trained)
                done += 1
        if counts is not None:
            counts.documents += len(rows) - (counts.bad - num_bad)
        return found

    def _of_texts(self, batch: Sequence[Record]) -> Iterator[_Ids]:
        tokens = tokens_of_texts(self._recipe, batch)
        for ids in np.split(tokens.ids, np.cumsum(tokens.lengths)[:-1]):
            yield ids, None

    def _of_conversations(self, batch: Sequence[Record], counts: Counts | None) -> Iterator[_Ids]:
        assert self._chat is not None
        for record in batch:
            documents = rendered(self._chat, record)
            if isinstance(documents, BadRecord):
                self._note_bad(documents.message, counts)
                yield _NOTHING.tokens, None
                continue
            if len(documents) > 1:
                raise ValueError(
                    f"{record.where}: found a row of {len(documents)} conversations, expected one "
                    f"in each row of source '{self._spec.name}', which is tokenised on the fly: "
                    "leave tokenise: on-the-fly out to prepare it"
                )
            (one,) = documents
            mask = np.zeros(len(one.ids), dtype=np.bool_)
            for start, stop in one.spans.tolist():
                mask[start:stop] = True
            yield one.ids, mask

    def _require_short(self, ids: npt.NDArray[np.integer], record: Record) -> None:
        if len(ids) > self._max_length and self._long_sequence == "error":
            raise ValueError(
                f"{record.where} has {len(ids):,} tokens, the context length is "
                f"{self._max_length:,}: give source '{self._spec.name}' long-sequence: truncate, "
                "or raise --seq-length"
            )

    def _note_bad(self, message: str, counts: Counts | None) -> None:
        if counts is not None:
            counts.add_bad(message, self._recipe.may_be_bad)


def lengths_of(rows: Sequence[DecodedRow]) -> Int64Array:
    """Return tokens of decoded rows."""
    return np.fromiter((len(one.tokens) for one in rows), np.int64, len(rows))

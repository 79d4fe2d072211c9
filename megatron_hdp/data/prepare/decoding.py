"""Records to tokens: what is written when a source is prepared, and drawn when it is not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_hdp.arrays import Int64Array
from megatron_hdp.data.chat import (
    BadConversationError,
    ChatTokens,
    Conversations,
    MediaConversations,
    Preferences,
)
from megatron_hdp.data.formats import BadRecord, Record
from megatron_hdp.data.sides import KINDS
from megatron_hdp.data.spec import MediaSpec, SourceSpec
from megatron_hdp.data.tokenizers import TokenBatch, Tokenizer, build_tokenizer

Chat = Conversations | MediaConversations | Preferences
"""What makes tokens of rows."""

_BATCH_BYTES, _BATCH_DOCUMENTS = 2**20, 1024


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """What becomes of every record of a source."""

    tokenizer: Tokenizer
    key: str | None
    """Of the text; None: rows are conversations."""
    sides: str | None = None
    """``pairs`` or ``labelled``: rows are such preferences."""
    media: MediaSpec | None = None
    """Of rows with pictures."""
    folder: str = ""
    """Where relative paths of pictures begin."""
    append_eod: bool = True
    template: str | None = None
    train_on: str = "assistant"
    """As a source declares them."""
    may_be_bad: bool = False
    """Whether bad documents are left out and counted; otherwise the first one is an error."""
    durable: bool = False
    """Whether what is finished must outlive the machine."""


def text_key(spec: SourceSpec, kind: str) -> str | None:
    """Return the key of a source's texts; None of conversations."""
    return spec.key if kind == "text" else None


def decoding_of(spec: SourceSpec, kind: str, tokenizer: str) -> Decoding:
    """Return what becomes of a source's records.

    Raises:
        ValueError, ImportError: the tokenizer cannot be loaded.
    """
    return Decoding(
        tokenizer=build_tokenizer(tokenizer),
        key=text_key(spec, kind),
        sides=kind if kind in KINDS else None,
        media=spec.media,
        folder=spec.media_folder,
        append_eod=spec.append_eod,
        template=spec.template,
        train_on=spec.train_on,
        may_be_bad=spec.bad_limit > 0,
        durable=True,
    )


def batches_of(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Yield documents that are tokenised at once: some, or one that is long."""
    batch: list[Record] = []
    size = 0
    for record in records:
        batch.append(record)
        size += len(record.value)
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def tokens_of_texts(decoding: Decoding, batch: Sequence[Record]) -> TokenBatch:
    """Return the tokens of texts, with the end of each where the source wants it.

    A text without a token has no end either: its length is 0.
    """
    found = decoding.tokenizer.tokenize_batch([record.value for record in batch])  # type: ignore[misc]
    if not decoding.append_eod:
        return found
    lengths = found.lengths[found.lengths > 0]
    ids = _with_ends(found.ids, lengths, decoding.tokenizer.eod)
    return TokenBatch(ids, found.lengths + (found.lengths > 0))


def conversations_of(decoding: Decoding) -> Chat:
    """Return what makes tokens of rows.

    Raises:
        ValueError, ModuleNotFoundError: as of `Conversations`.
    """
    if decoding.sides is not None:
        how = decoding.tokenizer, decoding.template, decoding.train_on
        return Preferences(decoding.sides, *how)
    if decoding.media is not None:
        return MediaConversations(
            decoding.tokenizer,
            decoding.media,
            decoding.folder,
            decoding.template,
            decoding.train_on,
            decoding.append_eod,
        )
    return Conversations(
        decoding.tokenizer, decoding.template, decoding.train_on, decoding.append_eod
    )


def rendered(conversations: Chat, record: Record) -> list[ChatTokens] | BadRecord:
    """Return the documents of a row, or what is wrong with it.

    Raises:
        ValueError: the template is at fault.
    """
    try:
        if isinstance(conversations, MediaConversations):
            number = record.origin.in_file(record.number) - 1
            return conversations.render(record.value, record.origin.path, number)
        return conversations.render(record.value)
    except BadConversationError as error:
        return BadRecord(f"{record.where}: {error}", record.num_bytes)


def _with_ends(
    ids: npt.NDArray[np.integer], lengths: Int64Array, eod: int
) -> npt.NDArray[np.integer]:
    """Put the end-of-document token behind each document."""
    is_token = np.ones(len(ids) + len(lengths), dtype=np.bool_)
    is_token[np.cumsum(lengths + 1) - 1] = False
    result = np.full(len(is_token), eod, dtype=np.int32)
    result[is_token] = ids
    return result

"""What a worker does: reads a shard, tokenises it, and writes it as a pair of its own."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_hdp.data.formats import BadRecord, Record, read
from megatron_hdp.data.index_file import Int64Array
from megatron_hdp.data.prepare.shards import Counts, Shard
from megatron_hdp.data.token_writer import TokenWriter, sync
from megatron_hdp.data.tokenizers import Tokenizer

MOST_NAMED = 5
_BATCH_BYTES, _BATCH_DOCUMENTS = 2**20, 1024

Tell = Callable[[int], object]
"""Is told how many more bytes of the files have been read."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is the same for all shards."""

    tokenizer: Tokenizer
    key: str | None
    """Of the text; None: rows are conversations."""
    append_eod: bool = True
    template: str | None = None
    train_on: str = "assistant"
    """As a source declares them."""
    may_be_bad: bool = False
    """Whether bad documents are left out and counted; otherwise the first one is an error."""
    durable: bool = False
    """Whether what is finished must outlive the machine."""


def run_shard(job: Job, shard: Shard, prefix: str, tell: Tell) -> Counts:
    """Write a shard as ``PREFIX.bin/.idx``, of conversations with ``PREFIX.spans``, or nothing.

    Raises:
        ValueError: a file cannot be read, or a document is bad and none may be.
        OSError: the disk is full, for one.
    """
    counts = Counts()
    try:
        with TokenWriter(prefix, job.tokenizer.vocab_size, durable=job.durable) as writer:
            records = _good(_records(job, shard), counts, job.may_be_bad, tell)
            if job.key is None:
                _write_conversations(job, records, writer, prefix, counts, tell)
            else:
                _write_texts(job, records, writer, counts, tell)
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, prefix) from error
    counts.documents, counts.tokens = writer.num_documents, writer.num_tokens
    return counts


def _records(job: Job, shard: Shard) -> Iterator[Record | BadRecord]:
    for piece in shard.pieces:
        yield from read(piece, job.key)


def _good(
    records: Iterator[Record | BadRecord], counts: Counts, may_be_bad: bool, tell: Tell
) -> Iterator[Record]:
    for record in records:
        if isinstance(record, Record):
            yield record
        else:
            tell(record.num_bytes)
            _count_bad(counts, may_be_bad, record.message)


def _count_bad(counts: Counts, may_be_bad: bool, message: str) -> None:
    if not may_be_bad:
        raise ValueError(message)
    counts.bad += 1
    if len(counts.named) < MOST_NAMED:
        counts.named.append(message)


def _write_texts(
    job: Job, records: Iterator[Record], writer: TokenWriter, counts: Counts, tell: Tell
) -> None:
    for batch in _batches(records):
        found = job.tokenizer.tokenize_batch([record.value for record in batch])  # type: ignore[misc]
        lengths = found.lengths[found.lengths > 0]
        counts.empty += len(found.lengths) - len(lengths)
        if job.append_eod:
            writer.add_batch(_with_ends(found.ids, lengths, job.tokenizer.eod), lengths + 1)
        else:
            writer.add_batch(found.ids, lengths)
        tell(sum(record.num_bytes for record in batch))


def _batches(records: Iterator[Record]) -> Iterator[list[Record]]:
    """Documents that are tokenised at once: some, or one that is long."""
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


def _with_ends(
    ids: npt.NDArray[np.integer], lengths: Int64Array, eod: int
) -> npt.NDArray[np.integer]:
    """Put the end-of-document token behind each document."""
    is_token = np.ones(len(ids) + len(lengths), dtype=np.bool_)
    is_token[np.cumsum(lengths + 1) - 1] = False
    result = np.full(len(is_token), eod, dtype=np.int32)
    result[is_token] = ids
    return result


def _write_conversations(
    job: Job,
    records: Iterator[Record],
    writer: TokenWriter,
    prefix: str,
    counts: Counts,
    tell: Tell,
) -> None:
    from megatron_hdp.data.chat import BadConversationError, Conversations
    from megatron_hdp.data.spans import SpansWriter

    conversations = Conversations(job.tokenizer, job.template, job.train_on, job.append_eod)
    with SpansWriter(prefix + ".spans") as spans:
        for record in records:
            tell(record.num_bytes)
            try:
                documents = conversations.render(record.value)
            except BadConversationError as error:
                _count_bad(counts, job.may_be_bad, f"{record.where}: {error}")
                continue
            for one in documents:
                writer.add(one.ids)
                spans.add(one.spans)
    if job.durable:
        sync(prefix + ".spans")

"""What a worker does: reads a shard, tokenises it, and writes it as a pair of its own."""

from collections.abc import Callable, Iterator

from megatron_hdp.data.formats import BadRecord, Record, read
from megatron_hdp.data.prepare.decoding import (
    Decoding,
    batches_of,
    conversations_of,
    rendered,
    tokens_of_texts,
)
from megatron_hdp.data.prepare.shards import Counts, Shard
from megatron_hdp.data.token_writer import TokenWriter

MOST_NAMED = 5

Tell = Callable[[int], object]
"""Is told how many more bytes of the files have been read."""


def run_shard(decoding: Decoding, shard: Shard, prefix: str, tell: Tell) -> Counts:
    """Write a shard as ``PREFIX.bin/.idx``, of conversations with ``PREFIX.spans``, or nothing.

    Raises:
        ValueError: a file cannot be read, or a document is bad and none may be.
        OSError: the disk is full, for one.
    """
    counts = Counts()
    try:
        with TokenWriter(prefix, decoding.tokenizer.vocab_size, durable=decoding.durable) as writer:
            records = _good(_records(decoding, shard), counts, decoding.may_be_bad, tell)
            if decoding.key is None:
                _write_conversations(decoding, records, writer, prefix, counts, tell)
            else:
                _write_texts(decoding, records, writer, counts, tell)
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, prefix) from error
    counts.documents, counts.tokens = writer.num_documents, writer.num_tokens
    return counts


def _records(decoding: Decoding, shard: Shard) -> Iterator[Record | BadRecord]:
    for piece in shard.pieces:
        yield from read(piece, decoding.key)


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
    decoding: Decoding, records: Iterator[Record], writer: TokenWriter, counts: Counts, tell: Tell
) -> None:
    for batch in batches_of(records):
        found = tokens_of_texts(decoding, batch)
        lengths = found.lengths[found.lengths > 0]
        counts.empty += len(found.lengths) - len(lengths)
        writer.add_batch(found.ids, lengths)
        tell(sum(record.num_bytes for record in batch))


def _write_conversations(
    decoding: Decoding,
    records: Iterator[Record],
    writer: TokenWriter,
    prefix: str,
    counts: Counts,
    tell: Tell,
) -> None:
    from megatron_hdp.data.spans import SpansWriter

    conversations = conversations_of(decoding)
    with SpansWriter(prefix + ".spans", durable=decoding.durable) as spans:
        for record in records:
            tell(record.num_bytes)
            documents = rendered(conversations, record)
            if isinstance(documents, BadRecord):
                _count_bad(counts, decoding.may_be_bad, documents.message)
                continue
            for one in documents:
                writer.add(one.ids)
                spans.add(one.spans)

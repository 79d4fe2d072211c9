"""What a worker does: reads a shard, tokenises it, and writes it as a pair of its own."""

from collections.abc import Callable, Iterator

from megatron_hdp.data import media, sides
from megatron_hdp.data.formats import BadRecord, Record, read
from megatron_hdp.data.prepare.decoding import (
    Decoding,
    batches_of,
    conversations_of,
    rendered,
    tokens_of_texts,
)
from megatron_hdp.data.prepare.shards import Counts, Shard
from megatron_hdp.data.spans import SpansWriter
from megatron_hdp.data.token_writer import TokenWriter

Tell = Callable[[int], object]
"""Is told how many more bytes of the files have been read."""


def run_shard(decoding: Decoding, shard: Shard, prefix: str, tell: Tell) -> Counts:
    """Write a shard as ``PREFIX.bin/.idx``, of conversations with ``PREFIX.spans``, or nothing.

    Preferences have ``PREFIX.sides``, rows with pictures ``PREFIX.items``, too; those that hold
    them ``PREFIX.media``.

    Raises:
        ValueError: a file cannot be read, or a document is bad and none may be.
        OSError: the disk is full, for one.
    """
    counts = Counts()
    try:
        with TokenWriter(prefix, decoding.tokenizer.vocab_size, durable=decoding.durable) as writer:
            records = _good(decoding, shard, counts, tell)
            if decoding.key is None:
                durable = decoding.durable
                with (
                    SpansWriter(f"{prefix}.spans", durable=durable) as spans,
                    media.InlineWriter(prefix, durable=durable) as inline,
                ):
                    items = media.ItemsWriter(inline)
                    writers = writer, spans, items
                    good = _write_conversations(decoding, records, writers, counts, tell)
                if decoding.media is not None:
                    items.write(prefix + media.SUFFIX, durable=durable)
                if decoding.sides is not None:
                    path = prefix + sides.SUFFIX
                    sides.write_sides(path, decoding.sides, good, durable=durable)
            else:
                _write_texts(decoding, records, writer, counts, tell)
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, prefix) from error
    counts.documents, counts.tokens = writer.num_documents, writer.num_tokens
    return counts


def _good(decoding: Decoding, shard: Shard, counts: Counts, tell: Tell) -> Iterator[Record]:
    for piece in shard.pieces:
        for record in read(piece, decoding.key):
            if isinstance(record, Record):
                yield record
            else:
                tell(record.num_bytes)
                counts.add_bad(record.message, decoding.may_be_bad)


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
    writers: tuple[TokenWriter, SpansWriter, media.ItemsWriter],
    counts: Counts,
    tell: Tell,
) -> list[bool]:
    """Return of each document whether it is the preferred side, where it has sides."""
    conversations = conversations_of(decoding)
    writer, spans, items = writers
    good = []
    for record in records:
        tell(record.num_bytes)
        documents = rendered(conversations, record)
        if isinstance(documents, BadRecord):
            counts.add_bad(documents.message, decoding.may_be_bad)
            continue
        for one in documents:
            writer.add(one.ids)
            spans.add(one.spans)
            items.add(one.items, one.item_tokens)
            good.append(bool(one.is_good))
    return good

"""From documents to sequences: the split, the context length and empty documents, decided once."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_hdp.data.index_file import Int64Array

LONG_SEQUENCE_POLICIES = ("error", "truncate", "split")
_MOST_WEIGHT = 1e300  # of all parts together: shares of it stay numbers
_SPLIT_NAMES = ("training", "validation", "test")


@dataclass(frozen=True)
class SequenceTable:
    """The sequences that training draws from: one row a sequence, in document order.

    A token's label is the next token of its document. So the last token of a document has none, the
    last token of a truncated sequence has none, and the last token of a split piece has one (the
    first token of the next piece).
    """

    document: Int64Array
    """Index of the document in the token file."""
    start: Int64Array
    """First token of the sequence within its document."""
    length: Int64Array
    """Tokens of the sequence, at least 1."""
    num_labels: Int64Array
    """Tokens of the sequence, counted from its first, that have a label."""
    num_empty: int = 0
    """Documents without a token, left out."""
    num_truncated: int = 0
    """Documents cut to the context length."""
    num_split: int = 0
    """Documents cut into several sequences."""

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.length)

    @classmethod
    def build(
        cls,
        lengths: Int64Array,
        *,
        max_length: int,
        long_sequence: str = "error",
        documents: range | slice | None = None,
    ) -> "SequenceTable":
        """Make the table of ``documents`` (all when ``None``) under a long-sequence policy.

        Args:
            lengths: tokens of every document of the token file.
            max_length: the context length in tokens.
            long_sequence: what happens to a longer document: ``error``, ``truncate`` (keep its
                beginning) or ``split`` (pieces of ``max_length``, the last one shorter).
            documents: the contiguous documents to take, such as a part of :func:`split_documents`.

        Raises:
            ValueError: a document is too long under ``error``, or no sequence is left.
        """
        if max_length < 1:
            raise ValueError(f"the context length is {max_length}, expected at least 1 token")
        if long_sequence not in LONG_SEQUENCE_POLICIES:
            raise ValueError(
                f"long-sequence policy {long_sequence!r}: expected one of "
                f"{', '.join(LONG_SEQUENCE_POLICIES)}"
            )
        first, stop = _bounds(documents, len(lengths))
        chosen = np.asarray(lengths[first:stop], dtype=np.int64)
        offsets = np.flatnonzero(chosen)
        if len(offsets) == 0:
            raise ValueError(
                f"no sequence to train on: {len(chosen):,} documents chosen of {len(lengths):,}, "
                "none with a token; check --data-path and --split"
            )
        num_empty = len(chosen) - len(offsets)
        document, document_length = offsets + first, chosen[offsets]
        num_long = int(np.count_nonzero(document_length > max_length))
        if num_long and long_sequence == "error":
            _raise_too_long(document, document_length, max_length, num_long)
        if num_long and long_sequence == "split":
            return cls(*_cut(document, document_length, max_length), num_empty, 0, num_long)
        length = np.minimum(document_length, max_length)
        start = np.zeros_like(length)
        return cls(document, start, length, length - 1, num_empty, num_long, 0)


def split_documents(num_documents: int, split: str) -> tuple[range, range, range]:
    """Cut the documents into training, validation and test as Megatron's ``--split`` does.

    Args:
        num_documents: documents of the corpus.
        split: one to three weights such as ``"969,30,1"``; they are normalised, missing ones are 0.

    Raises:
        ValueError: the weights are malformed, too many, or all 0.
    """
    weights = _split_weights(split)
    # Megatron's arithmetic, step by step: other rounding would move documents between the parts.
    shares = (np.asarray(weights) / np.sum(weights)).tolist()
    borders, total = [0], 0.0
    for share in shares:
        total += share
        borders.append(int(round(total * float(num_documents))))
    return (
        range(borders[0], borders[1]),
        range(borders[1], borders[2]),
        range(borders[2], borders[3]),
    )


def _split_weights(split: str) -> Sequence[float]:
    parts = [part for part in re.split(r"[,\s]+", split.strip()) if part]
    valid = all(re.fullmatch(r"[0-9]+\.?[0-9]*|\.[0-9]+", part) for part in parts)
    in_number = 1 <= len(parts) <= len(_SPLIT_NAMES)
    if not valid or not in_number or not 0 < sum(map(float, parts)) <= _MOST_WEIGHT:
        raise ValueError(
            f"--split {split[:60]!r}: expected one to three weights for "
            f'{", ".join(_SPLIT_NAMES)}, at least one above 0, such as "969,30,1"'
        )
    weights = [float(part) for part in parts]
    return weights + [0.0] * (len(_SPLIT_NAMES) - len(weights))


def _bounds(documents: range | slice | None, num_documents: int) -> tuple[int, int]:
    if documents is None:
        return 0, num_documents
    start, stop, step = slice(documents.start, documents.stop, documents.step).indices(
        num_documents
    )
    if step != 1:
        raise ValueError(f"documents {documents}: expected contiguous documents (step 1)")
    return start, max(start, stop)


def _raise_too_long(
    document: Int64Array, document_length: Int64Array, max_length: int, num_long: int
) -> None:
    first = int(np.argmax(document_length > max_length))
    raise ValueError(
        f"document {document[first]} has {document_length[first]:,} tokens, the context length is "
        f"{max_length:,} ({num_long:,} documents are longer, the longest has "
        f"{document_length.max():,}): use --hdp-long-sequence truncate or split, or raise "
        f"--seq-length"
    )


def _cut(
    document: Int64Array, document_length: Int64Array, max_length: int
) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """Cut documents into pieces; return the columns document, start, length, num_labels."""
    num_pieces = -(-document_length // max_length)
    first_piece = np.cumsum(num_pieces) - num_pieces
    total = np.repeat(document_length, num_pieces)
    start = (np.arange(len(total)) - np.repeat(first_piece, num_pieces)) * max_length
    length = np.minimum(total - start, max_length)
    is_last = start + length == total
    return np.repeat(document, num_pieces), start, length, length - is_last

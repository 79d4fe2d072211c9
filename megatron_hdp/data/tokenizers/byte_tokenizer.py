"""Bytes as tokens: no dependency, nothing to download."""

from collections.abc import Mapping, Sequence

import numpy as np

from megatron_hdp.arrays import Int64Array
from megatron_hdp.data.tokenizers.interface import TokenBatch


class ByteTokenizer:
    """The 256 byte values and one end-of-document id: 257 entries, nothing to download."""

    vocab_size = 257
    eod = 256
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = {}  # the end-of-document id has no text

    def tokenize_batch(self, documents: Sequence[str | bytes]) -> TokenBatch:
        """Return the UTF-8 bytes of documents; what has no encoding (lone surrogates) is ``?``."""
        raws = [
            one.encode("utf-8", "replace") if isinstance(one, str) else one for one in documents
        ]
        ids = np.frombuffer(b"".join(raws), dtype=np.uint8)
        return TokenBatch(ids, np.fromiter(map(len, raws), np.int64, len(raws)))

    def id_of(self, token: str) -> int | None:
        """Return the byte of a text of one byte."""
        raw = token.encode("utf-8", errors="replace")
        return raw[0] if len(raw) == 1 else None

    def tokenize_markup(self, text: str) -> tuple[Int64Array, Int64Array]:
        """Return the bytes; those of one character begin where it does."""
        ids = self.tokenize_batch([text]).ids.astype(np.int64)
        return ids, np.cumsum(ids & 0xC0 != 0x80, dtype=np.int64) - 1

"""Bytes as tokens: no dependency, nothing to download."""

from collections.abc import Sequence

import numpy as np

from megatron_hdp.arrays import Int64Array
from megatron_hdp.data.tokenizers.interface import TokenBatch


class ByteTokenizer:
    """The 256 byte values and one end-of-document id: 257 entries, nothing to download."""

    vocab_size = 257
    eod = 256
    chat_template: str | None = None

    def tokenize(self, text: str) -> Int64Array:
        """Return the text's UTF-8 bytes; what has no encoding (lone surrogates) becomes ``?``."""
        return self.tokenize_bytes(text.encode("utf-8", errors="replace"))

    def tokenize_bytes(self, raw: bytes) -> Int64Array:
        """Return the bytes themselves."""
        return np.frombuffer(raw, dtype=np.uint8).astype(np.int64)

    def tokenize_batch(self, documents: Sequence[str | bytes]) -> TokenBatch:
        """Return the bytes of all documents."""
        raws = [
            one.encode("utf-8", "replace") if isinstance(one, str) else one for one in documents
        ]
        ids = np.frombuffer(b"".join(raws), dtype=np.uint8)
        return TokenBatch(ids, np.fromiter(map(len, raws), np.int64, len(raws)))

    def detokenize(self, tokens: Int64Array | list[int]) -> str:
        """Return the text of the bytes; end-of-document ids are left out."""
        kept = [token for token in tokens if token != self.eod]
        return bytes(kept).decode("utf-8", errors="replace")

    @property
    def special_tokens(self) -> dict[str, str]:
        """Return none: the end-of-document id has no text."""
        return {}

    def id_of(self, token: str) -> int | None:
        """Return the byte of a text of one byte."""
        raw = token.encode("utf-8", errors="replace")
        return raw[0] if len(raw) == 1 else None

    def tokenize_markup(self, text: str) -> tuple[Int64Array, Int64Array]:
        """Return the bytes; those of one character begin where it does."""
        ids = self.tokenize(text)
        return ids, np.cumsum(ids & 0xC0 != 0x80, dtype=np.int64) - 1

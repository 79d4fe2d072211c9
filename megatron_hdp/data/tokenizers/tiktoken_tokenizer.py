"""Encodings of the ``tiktoken`` library."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_hdp.arrays import Int64Array
from megatron_hdp.data.extras import import_extra
from megatron_hdp.data.tokenizers.interface import (
    TokenBatch,
    available_cpus,
    batch_of,
    texts_of,
)


class TiktokenTokenizer:
    """An encoding of the ``tiktoken`` library, by name."""

    def __init__(self, name: str) -> None:
        tiktoken = import_extra("tiktoken", f"tokenizer tiktoken:{name}", "tokenizers")
        if name not in tiktoken.list_encoding_names():
            raise ValueError(
                f"tokenizer tiktoken:{name} is unknown: expected one of "
                f"{', '.join(tiktoken.list_encoding_names())}"
            )
        try:
            self._encoding: Any = tiktoken.get_encoding(name)
        except OSError as error:  # its tables are downloaded at the first use
            raise ValueError(
                f"the tables of tokenizer tiktoken:{name} cannot be downloaded ({error}): fetch "
                "them on a machine with network access and set TIKTOKEN_CACHE_DIR to their folder"
            ) from error
        self._name = name
        self.vocab_size = int(self._encoding.n_vocab)
        self.eod = int(self._encoding.eot_token)
        self.chat_template: str | None = None
        self.special_tokens = {"eos_token": str(self._encoding.decode([self.eod]))}

    def __reduce__(self) -> tuple[type["TiktokenTokenizer"], tuple[str]]:
        """Another process loads it by name."""
        return TiktokenTokenizer, (self._name,)

    def tokenize_batch(self, documents: Sequence[str | bytes]) -> TokenBatch:
        """Return the ids of documents, on as many threads as RAYON_NUM_THREADS says."""
        threads = int(os.environ.get("RAYON_NUM_THREADS") or available_cpus())
        texts = texts_of(documents)
        return batch_of(self._encoding.encode_ordinary_batch(texts, num_threads=threads))

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by its text."""
        try:
            return int(self._encoding.encode_single_token(token))
        except KeyError:
            return None

    def tokenize_markup(self, text: str) -> tuple[Int64Array, Int64Array]:
        """Return ids and first characters; a token in the middle of one begins where it does."""
        ids = self._encoding.encode(text, allowed_special="all")
        _, places = self._encoding.decode_with_offsets(ids)
        return np.asarray(ids, dtype=np.int64), np.asarray(places, dtype=np.int64)

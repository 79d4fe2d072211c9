"""What preprocessing, training and conversations need of a tokenizer, and what makes one."""

import os
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from megatron_hdp.arrays import Int64Array


class TokenBatch(NamedTuple):
    """The ids of several documents, one after the other."""

    ids: npt.NDArray[np.integer]
    lengths: Int64Array
    """Tokens of each document."""


class Tokenizer(Protocol):
    """What preprocessing and training need of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids, special tokens included."""

    @property
    def eod(self) -> int:
        """The id that ends a document."""

    def tokenize_batch(self, documents: Sequence[str | bytes]) -> TokenBatch:
        """Return the ids of documents, of text or as they lie on disk; no special token is added.

        Special tokens written in them are read as plain text, undecodable bytes as U+FFFD where
        text is needed.
        """

    @property
    def chat_template(self) -> str | None:
        """The Jinja template that comes with the tokenizer and writes conversations as text."""

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Texts of special tokens by the names that chat templates give them: ``bos_token`` ..."""

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by its text; of an unknown one the id that stands for such."""

    def tokenize_markup(self, text: str) -> tuple[Int64Array, Int64Array]:
        """Return the ids of a text that may hold special tokens, and where each of them begins.

        Special tokens written in the text become their ids; none is added. Places count characters
        and never fall.

        Raises:
            ValueError: the tokenizer does not tell places.
        """


def available_cpus() -> int:
    """Number of CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def texts_of(documents: Sequence[str | bytes]) -> list[str]:
    """Return documents as text; undecodable bytes become U+FFFD."""
    return [one if isinstance(one, str) else one.decode("utf-8", "replace") for one in documents]


def batch_of(ids: Sequence[Sequence[int]]) -> TokenBatch:
    """Return the ids of documents one after the other."""
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))
    flat = np.fromiter(chain.from_iterable(ids), np.int32, int(lengths.sum()))
    return TokenBatch(flat, lengths)

"""Writes ``.bin/.idx`` through megatron-core's builder: all of the pair or nothing of it."""

import os
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

_MAX_DOCUMENT_TOKENS = 2**31 - 1


class IndexedWriter:
    """A context manager that writes one document a sequence.

    Files are built under temporary names in the target folder and renamed when the block ends
    without an error; otherwise nothing is left behind and an older pair stays as it was.
    """

    def __init__(self, prefix: str | os.PathLike[str], vocab_size: int) -> None:
        """Prepare ``PREFIX.bin`` and ``PREFIX.idx``; missing folders are made.

        Args:
            prefix: path without suffix.
            vocab_size: chooses the integer type on disk, as Megatron does.
        """
        self._prefix = os.fspath(prefix)
        self._temporary = f"{self._prefix}.tmp{os.getpid()}"
        self._vocab_size = vocab_size
        self.num_documents = 0
        self.num_tokens = 0
        self._builder: IndexedDatasetBuilder

    def __enter__(self) -> Self:
        """Open the temporary token file."""
        os.makedirs(os.path.dirname(self._prefix) or ".", exist_ok=True)
        dtype = DType.optimal_dtype(self._vocab_size)
        self._builder = IndexedDatasetBuilder(self._temporary + ".bin", dtype=dtype)
        return self

    def add(self, tokens: npt.NDArray[np.integer]) -> None:
        """Append one document; it must have a token.

        Raises:
            ValueError: no token, more than an ``.idx`` can count, or an id outside the vocabulary.
        """
        if not 1 <= len(tokens) <= _MAX_DOCUMENT_TOKENS:
            raise ValueError(
                f"document {self.num_documents} has {len(tokens):,} tokens, an .idx holds 1 to "
                f"{_MAX_DOCUMENT_TOKENS:,}: leave empty documents out and cut longer ones"
            )
        if tokens.min() < 0 or tokens.max() >= self._vocab_size:
            raise ValueError(
                f"document {self.num_documents} has token ids {tokens.min()} to {tokens.max()}, "
                f"expected 0 to {self._vocab_size - 1}: check the tokenizer's vocab_size"
            )
        self._builder.add_document(tokens, [len(tokens)])
        self.num_documents += 1
        self.num_tokens += len(tokens)

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Put the pair in place, or remove what was written if the block failed."""
        try:
            if error_type is None:
                self._commit()
        finally:
            try:
                self._close(error_type is not None)
            finally:
                for suffix in (".bin", ".idx"):
                    if os.path.exists(self._temporary + suffix):
                        os.remove(self._temporary + suffix)

    def _close(self, failed: bool) -> None:
        """Close the token file; on a full disk it cannot write its last bytes, and says so once."""
        try:
            self._builder.data_file.close()
        except OSError:
            if not failed:
                raise

    def _commit(self) -> None:
        self._builder.finalize(self._temporary + ".idx")
        # Without its .idx a half-replaced pair is refused at open instead of being read wrongly.
        if os.path.exists(self._prefix + ".idx"):
            os.remove(self._prefix + ".idx")
        os.replace(self._temporary + ".bin", self._prefix + ".bin")
        os.replace(self._temporary + ".idx", self._prefix + ".idx")

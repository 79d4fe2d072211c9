"""All of an ``.idx`` at once, for commands that look at every document of a corpus."""

import os
from dataclasses import dataclass

import numpy as np

from megatron_hdp.arrays import Int64Array
from megatron_hdp.data.index_checks import IndexChecks
from megatron_hdp.data.index_file import IndexFile


@dataclass(frozen=True)
class DocumentIndex:
    """What an ``.idx`` says about its documents: 16 bytes of memory each."""

    dtype: np.dtype[np.generic]
    """Integer type of the tokens in the ``.bin``."""
    lengths: Int64Array
    """Tokens of each document."""
    begins: Int64Array
    """Place of each document's first token in the ``.bin``, counted in tokens."""
    num_bytes: int
    """Least size of the ``.bin`` that holds every document."""


def read_document_index(path: str | os.PathLike[str]) -> DocumentIndex:
    """Read and check an ``.idx`` file; a document of several sequences becomes one.

    Raises:
        TokenFileNotFoundError: there is no such file.
        TokenFileError: it is no index of version 1, is truncated, or contradicts itself.
    """
    index = IndexFile(path)
    checks = IndexChecks(index)
    lengths, begins = np.empty((2, index.num_documents), dtype=np.int64)
    for documents in checks.documents():
        here = slice(documents.first, documents.first + len(documents.lengths))
        lengths[here], begins[here] = documents.lengths, documents.begins
    return DocumentIndex(index.dtype, lengths, begins, checks.num_bytes)

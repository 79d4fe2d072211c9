"""From the prefix of a ``.bin/.idx`` pair to its table of sequences and a reader of its tokens."""

import os
import sys
from pathlib import Path

import numpy as np

from megatron_hdp.data.index_checks import IndexChecks
from megatron_hdp.data.index_file import IndexFile
from megatron_hdp.data.tables.cache import TableCache
from megatron_hdp.data.tables.columns import fill_private
from megatron_hdp.data.tables.cutting import Cutting, Survey
from megatron_hdp.data.tables.table import SequenceTable
from megatron_hdp.data.token_file import TokenReader
from megatron_hdp.files import Say


def count_documents(prefix: str | os.PathLike[str]) -> int:
    """Return the documents of a pair, empty ones included, from the header of its ``.idx``.

    Raises:
        TokenFileError: there is no ``.idx``, or its header does not fit its size.
    """
    return IndexFile(f"{os.fspath(prefix)}.idx").num_documents


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def open_source(
    prefix: str | os.PathLike[str],
    *,
    max_length: int,
    long_sequence: str = "error",
    documents: range | None = None,
    cache_folder: Path | None = None,
    say: Say = _to_stderr,
) -> tuple[SequenceTable, TokenReader]:
    """Open what a run reads of a pair: the sequences, and their tokens by place.

    Args:
        prefix: path without ``.bin`` / ``.idx``.
        max_length: the context length in tokens.
        long_sequence: what happens to a longer document, see `Cutting`.
        documents: the contiguous documents to take, such as a part of :func:`split_documents`; all
            when ``None``.
        cache_folder: of ``--data-cache-path``: the table lies there in a file that the processes of
            a node share, built by the first of them. ``None``: in memory of this process.
        say: takes lines for the log: who builds, and how far it is.

    Raises:
        TokenFileError: one of the two files is missing, malformed or too short.
        TableCacheError: the folder cannot be used.
        ValueError: a document is too long under ``error``, or no sequence is left.
    """
    index = IndexFile(f"{os.fspath(prefix)}.idx")
    cutting = Cutting.of(
        index.num_documents, max_length=max_length, long_sequence=long_sequence, documents=documents
    )
    if cache_folder is not None:
        found = TableCache(index, cutting, cache_folder, say).open()
        table = SequenceTable(found.facts, found.columns)
        token_type, num_bytes = np.dtype(found.origin.token_type), found.origin.token_bytes
    else:
        checks = IndexChecks(index)
        survey = Survey.of(cutting, checks.documents())
        table = SequenceTable(*fill_private(index.documents(), survey))
        token_type, num_bytes = index.dtype, checks.num_bytes
    return table, TokenReader(prefix, token_type, num_bytes)

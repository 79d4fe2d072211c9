"""From a ``.bin/.idx`` pair and Megatron's ``--split`` to a table of sequences and its tokens."""

import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from megatron_hdp.data.index_checks import IndexChecks
from megatron_hdp.data.index_file import Documents, IndexFile
from megatron_hdp.data.sums import Sums
from megatron_hdp.data.tables.cache import TableCache
from megatron_hdp.data.tables.columns import fill_private
from megatron_hdp.data.tables.cutting import CUT_THEM, Cutting, Survey
from megatron_hdp.data.tables.table import SequenceTable
from megatron_hdp.data.token_file import TokenReader
from megatron_hdp.files import Say

_MOST_WEIGHT = 1e300  # of all parts together: shares of it stay numbers
_SPLIT_NAMES = ("training", "validation", "test")


def count_documents(prefix: str | os.PathLike[str]) -> int:
    """Return the documents of a pair, empty ones included, from the header of its ``.idx``.

    Raises:
        TokenFileError: there is no ``.idx``, or its header does not fit its size.
    """
    return IndexFile(f"{os.fspath(prefix)}.idx").num_documents


def split_documents(num_documents: int, split: str) -> tuple[range, range, range]:
    """Cut the documents into training, validation and test as Megatron's ``--split`` does.

    One to three weights such as ``"969,30,1"`` are normalised; missing ones are 0.

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


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _unchanged(documents: Documents) -> Documents:
    return documents


def open_source(
    prefix: str | os.PathLike[str],
    *,
    max_length: int,
    long_sequence: str = "error",
    documents: range | None = None,
    cache_folder: Path | None = None,
    say: Say = _to_stderr,
    longer: Callable[[Documents], Documents] | None = None,
    remedy: str | None = None,
) -> tuple[SequenceTable, TokenReader]:
    """Open what a run reads of a pair: the sequences of some documents, and their tokens by place.

    The table lies in memory of this process, or in a file of `cache_folder` (``--data-cache-path``)
    that the processes of a node share, built by the first of them. `long_sequence` and `remedy` are
    as of `Cutting`. With `longer`, which gives documents the lengths that they have once they are
    drawn, the table lies in memory.

    Raises:
        TokenFileError: one of the two files is missing, malformed, too short or not as written.
        TableCacheError: the folder cannot be used.
        ValueError: a document is too long under ``error``, or no sequence is left.
    """
    index = IndexFile(f"{os.fspath(prefix)}.idx")
    cutting = Cutting.of(
        index.num_documents,
        max_length=max_length,
        long_sequence=long_sequence,
        documents=documents,
        remedy=remedy or CUT_THEM,
    )
    sums = Sums.beside(prefix)
    if cache_folder is not None and longer is None:
        found = TableCache(index, cutting, cache_folder, say, sums).open()
        table = SequenceTable(found.facts, found.columns)
        token_type, num_bytes = np.dtype(found.origin.token_type), found.origin.token_bytes
    else:
        if sums is not None:
            sums.require_file(".idx")
        checks = IndexChecks(index)
        change = longer or _unchanged
        survey = Survey.of(cutting, map(change, checks.documents()))
        table = SequenceTable(*fill_private(map(change, index.documents()), survey))
        token_type, num_bytes = index.dtype, checks.num_bytes
    return table, TokenReader(prefix, token_type, num_bytes)

"""The columns of a table of sequences: their types, their values piece by piece, their facts."""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_hdp.arrays import Int64Array
from megatron_hdp.data.index_file import Documents, TokenFileError
from megatron_hdp.data.tables.cutting import Survey

Column = Int64Array | npt.NDArray[np.uint32]
Put = Callable[[str, int, Column], None]
"""Takes the name of a column, a row, and the values from that row on."""

_MOST_UINT32 = 2**32 - 1


@dataclass(frozen=True, kw_only=True)
class TableFacts:
    """Counted once, when the table is made."""

    num_sequences: int
    """Rows of the table, at least 1."""
    num_tokens: int
    """Tokens of all sequences."""
    longest: int
    """Tokens of the longest sequence."""
    corpus: int
    """64-bit fingerprint of the sequences' lengths, in their order."""
    first_document: int
    """Number of the first document that the table was made from."""
    num_documents: int
    """How many it was made from, empty ones included."""
    num_empty: int
    """Documents without a token, left out."""
    num_truncated: int
    """Documents cut to the context length."""
    num_split: int
    """Documents cut into several sequences."""


@dataclass(frozen=True)
class Columns:
    """Of a table, one value a row; in memory of this process, or mapped from a file."""

    begin: Column
    """Place of each sequence's first token in the token file, in tokens."""
    length: Column
    """Tokens of each sequence."""
    document: Column | None = None
    """Number of each one's document; None where row ``r`` is document ``first + r``."""


def column_types(survey: Survey) -> dict[str, str]:
    """The numpy type of each column, the least that holds it: 12 to 24 bytes a row in all."""
    types = {"begin": "<i8", "length": _least_type(survey.longest)}
    if not survey.is_plain:
        types["document"] = _least_type(survey.cutting.documents.stop)
    return types


def fill(documents: Iterable[Documents], survey: Survey, put: Put) -> TableFacts:
    """Hand over all rows of a table, each column from its first row on.

    Raises:
        TokenFileError: the documents are others than those that were counted.
    """
    types = column_types(survey)
    # that of runtime.health.fingerprint over all lengths, which checkpoints hold
    digest = hashlib.blake2b((8 * survey.num_sequences).to_bytes(8, "little"), digest_size=8)
    num_rows = num_tokens = 0
    for rows in (rows for piece in documents for rows in survey.cutting.rows(piece)):
        if len(rows.lengths) == 0:
            continue
        digest.update(rows.lengths.data)
        num_rows, first = num_rows + len(rows.lengths), num_rows
        num_tokens += int(rows.lengths.sum())
        if num_rows > survey.num_sequences:
            break
        values = {"begin": rows.begins, "length": rows.lengths, "document": rows.documents}
        for name, dtype in types.items():
            put(name, first, values[name].astype(dtype, copy=False))
    if (num_rows, num_tokens) != (survey.num_sequences, survey.num_tokens):
        raise TokenFileError(
            f"the .idx gave {survey.num_sequences:,} sequences of {survey.num_tokens:,} tokens "
            "when it was read first, others when it was read again: something changes it; wait "
            "until it is complete"
        )
    documents_taken = survey.cutting.documents
    return TableFacts(
        num_sequences=num_rows,
        num_tokens=num_tokens,
        longest=survey.longest,
        corpus=int.from_bytes(digest.digest(), "little"),
        first_document=documents_taken.start,
        num_documents=len(documents_taken),
        num_empty=survey.num_empty,
        num_truncated=survey.num_truncated,
        num_split=survey.num_split,
    )


def fill_private(documents: Iterable[Documents], survey: Survey) -> tuple[TableFacts, Columns]:
    """Make the columns in memory of this process."""
    columns: dict[str, Column] = {
        name: np.empty(survey.num_sequences, dtype=dtype)
        for name, dtype in column_types(survey).items()
    }

    def put(name: str, first: int, values: Column) -> None:
        columns[name][first : first + len(values)] = values

    facts = fill(documents, survey, put)
    return facts, Columns(**columns)


def _least_type(largest: int) -> str:
    return "<u4" if largest <= _MOST_UINT32 else "<i8"

"""The sequences that training draws from, one row each, looked up by row and never as a whole."""

import numpy as np
import numpy.typing as npt

from megatron_hdp.arrays import Int64Array
from megatron_hdp.data.index_file import Documents
from megatron_hdp.data.tables.columns import Columns, TableFacts, fill_private
from megatron_hdp.data.tables.cutting import Cutting, Survey


class SequenceTable:
    """Rows in document order; columns lie in memory of this process or in a file mapped by many.

    A token's label is the next token of its document. So the last token of a document has none, the
    last token of a truncated sequence has none, and the last token of a split piece has one (the
    first token of the next piece).

    Attributes:
        facts: what is known without a look at the rows.
    """

    def __init__(self, facts: TableFacts, columns: Columns) -> None:
        """Take columns of ``facts.num_sequences`` rows; see `build` and `open_table`."""
        self.facts = facts
        self._begin = columns.begin
        self._length = columns.length
        self._document = columns.document

    @classmethod
    def build(
        cls,
        lengths: npt.ArrayLike,
        *,
        max_length: int,
        long_sequence: str = "error",
        documents: range | None = None,
    ) -> "SequenceTable":
        """Make the table of documents that lie one after another, in memory of this process.

        Raises:
            ValueError: a document is too long under ``error``, or no sequence is left.
        """
        counts = np.asarray(lengths, dtype=np.int64)
        piece = Documents(0, counts, np.cumsum(counts) - counts)
        cutting = Cutting.of(
            len(counts), max_length=max_length, long_sequence=long_sequence, documents=documents
        )
        return cls(*fill_private([piece], Survey.of(cutting, [piece])))

    def __len__(self) -> int:
        """Return the number of sequences."""
        return self.facts.num_sequences

    @property
    def mean_length(self) -> float:
        """Tokens of a sequence on average."""
        return self.facts.num_tokens / self.facts.num_sequences

    @property
    def num_bytes(self) -> int:
        """Bytes of the columns, wherever they lie."""
        columns = (self._begin, self._length, self._document)
        return sum(column.nbytes for column in columns if column is not None)

    def lengths(self, rows: Int64Array) -> Int64Array:
        """Return the tokens of each of these sequences, at least 1."""
        return self._length[rows].astype(np.int64, copy=False)

    def begins(self, rows: Int64Array) -> Int64Array:
        """Return the place of each one's first token in the token file, in tokens."""
        return self._begin[rows].astype(np.int64, copy=False)

    def documents(self, rows: Int64Array) -> Int64Array:
        """Return the number of each one's document in the token file."""
        if self._document is None:
            return np.asarray(rows, dtype=np.int64) + self.facts.first_document
        return self._document[rows].astype(np.int64, copy=False)

    def num_labels(self, rows: Int64Array, lengths: Int64Array | None = None) -> Int64Array:
        """Return how many tokens of each sequence, counted from its first, have a label.

        Their lengths are looked up, which waits for memory, unless the caller has them.
        """
        if lengths is None:
            lengths = self.lengths(rows)
        if self._document is None or not self.facts.num_split:
            return lengths - 1
        following = np.minimum(np.asarray(rows) + 1, len(self) - 1)
        goes_on = (self._document[following] == self._document[rows]) & (following > rows)
        num_labels: Int64Array = lengths - ~goes_on
        return num_labels

    def starts(self, rows: Int64Array) -> Int64Array:
        """Return the place of each sequence's first token within its document, in tokens."""
        if self._document is None or not self.facts.num_split:
            return np.zeros(len(rows), dtype=np.int64)
        # of the column's own type: of another one numpy would copy the whole column
        first = np.searchsorted(self._document, self._document[rows], side="left")
        return self.begins(rows) - self.begins(first)

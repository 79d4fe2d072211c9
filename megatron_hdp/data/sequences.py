"""What drawing steps and reading slices need of a table of sequences, wherever it lives."""

from typing import Protocol

from megatron_hdp.data.index_file import Int64Array


class Sequences(Protocol):
    """The sequences that a run draws from, by row; `tables.SequenceTable` is the one there is."""

    def __len__(self) -> int:
        """Return the number of sequences."""

    @property
    def mean_length(self) -> float:
        """Tokens of a sequence on average."""

    def lengths(self, rows: Int64Array) -> Int64Array:
        """Return the tokens of each of these sequences."""

    def num_labels(self, rows: Int64Array) -> Int64Array:
        """Return of each of these how many of its tokens, from the first on, have a label."""

    def begins(self, rows: Int64Array) -> Int64Array:
        """Return the place of each one's first token in the token file, in tokens."""

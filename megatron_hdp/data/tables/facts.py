"""What is known of a table of sequences without a look at its rows."""

from dataclasses import dataclass


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

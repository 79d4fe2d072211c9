"""What a step holds: its sequences, how long they are and how much of them carries loss."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_hdp.arrays import Int64Array
from megatron_hdp.data.mixture.position import Position


@dataclass(frozen=True)
class Step:
    """The sequences of one global batch, in the order in which they were drawn.

    A sequence is known by its place in these arrays, ``[n]`` each. It lies in one row of its
    source's sequence table and is all of it, unless the schedule wants shorter sequences.
    """

    sources: Int64Array
    """Index of each one's source."""
    rows: Int64Array
    """Row of the source's table."""
    starts: Int64Array
    """First token, counted from the row's first."""
    lengths: Int64Array
    """Tokens, padding not counted."""
    num_labels: Int64Array
    """Tokens, counted from the first, that have a next one to predict."""
    num_loss_tokens: Int64Array
    """Those of them whose prediction is trained."""
    before: Position
    """Where it begins."""
    after: Position
    """Where the next one begins."""
    max_length: int
    """The schedule's bound of its sequences."""
    weights: tuple[float, ...]
    """The schedule's weights of the sources; of those that have ended, nothing is drawn."""

    def __len__(self) -> int:
        """Return the number of sequences; 0 where every source has ended."""
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return int(self.lengths.sum())

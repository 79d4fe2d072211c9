"""How large a step is: so many sequences, which may grow as training goes on, or tokens."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchSize:
    """The size of a global batch, in sequences or in tokens.

    Raises:
        ValueError: not exactly one of them, one below 1, or growth that does not ascend.
    """

    sequences: int | None = None
    """The last size, if it grows."""
    tokens: int | None = None
    """A step takes sequences until the next one would exceed this many; at least one."""
    growth: tuple[tuple[int, int], ...] = ()
    """From how many sequences drawn in steps before on a step has how many; the first from 0 on."""

    def __post_init__(self) -> None:
        sizes = [size for size in (self.sequences, self.tokens) if size is not None]
        if len(sizes) != 1 or sizes[0] < 1:
            raise ValueError(
                f"global batch of {self.sequences} sequences and {self.tokens} tokens: give "
                "exactly one, at least 1 (--global-batch-size or --hdp-global-batch-tokens)"
            )
        starts = [start for start, _ in self.growth]
        if starts and (starts[0] != 0 or starts != sorted(set(starts)) or self.tokens is not None):
            raise ValueError(
                f"sizes of a global batch from these sequences on: found {starts}, expected 0 and "
                "then ever more, without --hdp-global-batch-tokens"
            )
        if any(size < 1 for _, size in self.growth):
            raise ValueError(f"sizes of a global batch: found {self.growth}, expected at least 1")

    def at(self, num_drawn: int) -> int | None:
        """Sequences of the step before which so many were drawn; None where tokens decide."""
        if not self.growth:
            return self.sequences
        starts = [start for start, _ in self.growth]
        return self.growth[bisect_right(starts, num_drawn) - 1][1]

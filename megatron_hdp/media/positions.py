"""Rotary positions in time, height and width (M-RoPE), as Qwen's models give them to rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_hdp.arrays import Int64Array

AXES = 3


@dataclass(frozen=True)
class RowGrid:
    """An item's rows in time, height and width."""

    t: int
    h: int
    w: int
    step: float = 1.0
    """Positions between temporal neighbours; fractions are cut off."""
    first: int = 0
    """Temporal neighbours before these, which are items of their own: they stand right before, and
    all begin at one position."""

    @property
    def num_rows(self) -> int:
        """All of them."""
        return self.t * self.h * self.w


@dataclass(frozen=True)
class MRope:
    """Which frequencies of a head turn by the position in time, in height and in width.

    Contiguous, as Qwen2.5-VL has them: the first `sections[0]` by time, the next by height, the
    last by width. Interleaved, as Qwen3-VL: time, height, width in turn, until those of height and
    width are used up; the others by time.
    """

    sections: tuple[int, int, int]
    is_interleaved: bool = False

    def __post_init__(self) -> None:
        """Refuses what are no sections.

        Raises:
            ValueError: they are not three, or height and width have more turns than there are.
        """
        fits = len(self.sections) == AXES and min(self.sections) >= 0
        if not fits or (self.is_interleaved and max(self.sections[1:]) > self.num // AXES):
            kind = "interleaved" if self.is_interleaved else "contiguous"
            raise ValueError(
                f"found {kind} sections {list(self.sections)} of frequencies, expected three from "
                "0 on, interleaved ones of height and width at most a third of all"
            )

    @property
    def num(self) -> int:
        """Frequencies: half of a head's channels."""
        return sum(self.sections)

    def axes(self) -> Int64Array:
        """0, 1 or 2 for time, height or width, of each frequency, ``[num]``."""
        if not self.is_interleaved:
            return np.repeat(np.arange(AXES), self.sections)
        found = np.zeros(self.num, dtype=np.int64)
        for axis in (1, 2):
            found[axis : AXES * self.sections[axis] : AXES] = axis
        return found


def row_positions(runs: Sequence[int | RowGrid]) -> Int64Array:
    """Return the positions of a sequence's tokens, ``[3, t]``.

    A token of text stands one behind what is before it, on all axes. An item's rows begin there
    likewise, and differ by their places in the item; what follows stands behind its longer side,
    unless it is the same video's.

    Args:
        runs: of tokens and of items, in their order.
    """
    found, begin, of_item = [np.zeros((AXES, 0), dtype=np.int64)], 0, 0
    for run in runs:
        if isinstance(run, RowGrid):
            of_item = begin = of_item if run.first else begin
            frames = (run.first + np.arange(run.t, dtype=np.float32)) * np.float32(run.step)
            sides = frames.astype(np.int64), np.arange(run.h), np.arange(run.w)
            found.append(begin + np.stack(np.meshgrid(*sides, indexing="ij")).reshape(AXES, -1))
            begin += max(run.h, run.w)
        else:
            found.append(np.tile(begin + np.arange(run), (AXES, 1)))
            begin += run
    return np.concatenate(found, axis=1)

"""The pipeline that each HDP rank is: stages, model chunks, and what each of them takes."""

import math
from dataclasses import dataclass

import numpy as np

from megatron_hdp.arrays import Float64Array


@dataclass(frozen=True)
class Pipeline:
    """Stages of a rank and the model chunks of each; row ``c P + s`` is chunk c of stage s.

    Rows are the model's order: a micro-batch passes row 0, row 1 and so on, and back.

    Raises:
        ValueError: a number is out of range.
    """

    stages: int = 1
    chunks: int = 1
    """Parts of the model on each stage (virtual stages V); above 1 the schedule is interleaved."""
    weights: tuple[float, ...] = ()
    """Relative time of each row, of any sum; empty: all alike."""

    def __post_init__(self) -> None:
        if self.stages < 1:
            raise ValueError(f"pipeline_stages is {self.stages}; expected at least 1")
        if self.chunks < 1:
            raise ValueError(f"virtual_stages is {self.chunks}; expected at least 1")
        if self.chunks > 1 and self.stages == 1:
            raise ValueError(
                f"virtual_stages is {self.chunks} with one pipeline stage; expected 1, or several "
                "stages"
            )
        if not self.weights:
            return
        if len(self.weights) != self.rows:
            raise ValueError(
                f"stage_weights has {len(self.weights)} entries; expected {self.rows}, one for "
                f"each virtual stage ({self.stages} stages x {self.chunks}), or none"
            )
        wrong = [one for one in self.weights if not (math.isfinite(one) and one >= 0)]
        if wrong or sum(self.weights) <= 0:
            found = f"{wrong[0]!r}" if wrong else "only zeros"
            raise ValueError(
                f"stage_weights holds {found}; expected numbers of at least 0, one of them above"
            )

    @property
    def rows(self) -> int:
        """Virtual stages of the whole model."""
        return self.stages * self.chunks

    @property
    def row_weights(self) -> Float64Array:
        """Each row's share of a micro-batch's time; ``[rows]``, of sum 1."""
        if not self.weights:
            return np.full(self.rows, 1 / self.rows)
        weights = np.array(self.weights, dtype=np.float64)
        shares: Float64Array = weights / weights.sum()
        return shares

    @property
    def stage_weights(self) -> Float64Array:
        """Each stage's share, all its chunks; ``[stages]``, of sum 1."""
        shares: Float64Array = self.row_weights.reshape(self.chunks, self.stages).sum(axis=0)
        return shares

    @property
    def group_size(self) -> int:
        """Micro-batches that a stage runs through one chunk before the next; 1 without chunks.

        A pipeline's count must be a multiple of it. On stage ``s`` of ``P`` with ``V`` chunks,
        operations being counted over all chunks, forward ``i`` then comes before backward ``j``
        exactly when ``i <= j + 2 (P - 1 - s) + (V - 1) P``, whatever the count: pipelines agree on
        the order of what they share. With groups that are cut short they would not.
        """
        return self.stages if self.chunks > 1 else 1

    def warm_up(self, stage: int) -> int:
        """Forwards that a stage runs before the first backward, less one: w of the line above."""
        behind = self.stages - 1 - stage
        return behind if self.chunks == 1 else 2 * behind + (self.chunks - 1) * self.stages

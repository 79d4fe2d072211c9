"""How much later a step of pipelines is for its items, wave after wave of a plan."""

import numpy as np

from megatron_hdp.arrays import Float64Array
from megatron_hdp.media.cost import ItemCostModel
from megatron_hdp.media.evaluation import items_bound_s
from megatron_hdp.media.gaps import PipelineGaps
from megatron_hdp.media.items import ItemBatch


class Lateness:
    """Of each rank, whose rows may be late for a wave, or whose gradients for the step's end.

    What one wave makes late in any case is free for the others: its largest item over as many ranks
    as make it fastest, or an even share of it.

    Args:
        batch: the items of a step, with their waves.
        gaps: of the schedule.
        cost: of items.
        is_even: whether gradients of all waves may be as late as those of the last ones; else those
            have the ranks that are done in time to themselves.
    """

    def __init__(
        self, batch: ItemBatch, gaps: PipelineGaps, cost: ItemCostModel, *, is_even: bool
    ) -> None:
        assert batch.waves is not None, "gaps are those of waves"
        self._gaps, self._share = gaps, cost.forward_share
        self._encoded_s = np.zeros(batch.num_ranks)
        self._learnt_s = gaps.free_from_s.copy()
        self._rows_s = self._gradients_s = 0.0
        for wave in np.unique(batch.waves).tolist():
            of_wave = batch.of_wave(np.flatnonzero(batch.waves == wave))
            least_s = items_bound_s(of_wave, cost)
            rows_s = self._share * least_s - self._wanted_s(wave).max()
            self._rows_s = max(self._rows_s, float(rows_s))
            if is_even:
                after_s = gaps.given_s[wave] - gaps.makespan_s
                late_s = (1 - self._share) * least_s + float(after_s)
                self._gradients_s = max(self._gradients_s, late_s)

    @property
    def late_s(self) -> float:
        """Of the step so far, at most."""
        return self._rows_s + self._gradients_s

    def busy_s(self, wave: int) -> tuple[Float64Array, float]:
        """Return how much less of a wave each rank can take than the one that can take most.

        ``[ranks]``; and what that one can take before the step is later than it is by now; all in
        seconds of all passes.
        """
        gaps = self._gaps
        late_s: Float64Array = (self._encoded_s - self._wanted_s(wave) - self._rows_s) / self._share
        if self._share < 1:
            gradients_s = np.maximum(self._learnt_s, gaps.given_s[wave]) - gaps.makespan_s
            gradients_s -= self._gradients_s
            late_s = np.maximum(late_s, gradients_s / (1 - self._share))
        first_s = float(late_s.min())
        return late_s - first_s, max(-first_s, 0.0)

    def add(self, wave: int, work_s: Float64Array) -> None:
        """Have ranks take so much of a wave, ``[ranks]``."""
        self._encoded_s += self._share * work_s
        late_s = self._encoded_s - self._wanted_s(wave)
        self._rows_s = max(self._rows_s, float(late_s.max()))
        takes_s = (1 - self._share) * work_s
        ends_s = np.maximum(self._learnt_s, self._gaps.given_s[wave]) + takes_s
        self._learnt_s = np.where(takes_s > 0, ends_s, self._learnt_s)
        late_s = self._learnt_s - self._gaps.makespan_s
        self._gradients_s = max(self._gradients_s, float(late_s.max()))

    def _wanted_s(self, wave: int) -> Float64Array:
        """Until when each rank must have encoded a wave."""
        found: Float64Array = np.minimum(self._gaps.free_until_s, self._gaps.wanted_s[wave])
        return found

"""Sources that have failed: what was drawn of them is left out, and a run goes on without them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megatron_hdp.data.steps import RankStep, StepTotals
from megatron_hdp.megatron.parallel import say
from megatron_hdp.megatron.step.left_out import LeftOut, found_by_all
from megatron_hdp.runtime.gathering import gathered


class LostSources:
    """Takes what failed sources did not give out of steps that were drawn before, and tells of it.

    A node that could not read a sequence decides for all: its loss tokens leave the global batch.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._num_left_out: Counter[str] = Counter()
        self._told: set[str] = set()
        self._steps_told: set[tuple[str, int]] = set()

    def drop(self, step: RankStep) -> list[LeftOut]:
        """Takes lost sequences, whichever rank lacks them, out of this rank's micro-batches.

        Every rank of the job must call this.

        Returns:
            Those of the whole step, in its order, alike on every rank.
        """
        found = found_by_all(step, [i for one in step.lost for i in one.ids])
        whys = gathered({one.name: one.why for one in step.lost})
        why = {name: text for of_rank in reversed(whys) for name, text in of_rank.items()}
        number = step.totals.before.steps + 1
        for name, count in sorted(Counter(self._names[one.source] for one in found).items()):
            if (name, number) in self._steps_told:
                continue  # an evaluation has the same steps each time, Megatron may run one again
            self._steps_told.add((name, number))
            self._num_left_out[name] += count
            say(
                f"source '{name}' has failed ({why[name]}): {count:,} of its sequences are left "
                f"out of step {number:,}"
            )
        return found

    def tell(self, totals: StepTotals) -> None:
        """Says once of each source that the run goes on without it."""
        for name, why in totals.without.items():
            if name not in self._told:
                self._told.add(name)
                say(
                    f"source '{name}' has failed ({why}): the run goes on without it, its "
                    f"share goes to the others; {self._num_left_out[name]:,} of its sequences were "
                    "drawn and are not trained"
                )

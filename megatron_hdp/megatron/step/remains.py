"""What is left of a step without corrupt documents, and what failed sources did not give."""

from __future__ import annotations

from megatron_hdp.data.mixture import Corpus
from megatron_hdp.data.steps import Amounts, RankStep
from megatron_hdp.megatron.parallel import compute_device
from megatron_hdp.megatron.step.corrupt_documents import CorruptDocuments
from megatron_hdp.megatron.step.left_out import amounts_without
from megatron_hdp.megatron.step.lost_sources import LostSources
from megatron_hdp.runtime.gathering import largest


class Remains:
    """Takes out of the steps of one split what cannot be trained, alike on all ranks."""

    def __init__(self, corpus: Corpus, vocab_size: int, corrupt_limit: int) -> None:
        self._corrupt = CorruptDocuments(corpus, vocab_size, corrupt_limit)
        self._lost = LostSources(corpus.names)

    @property
    def num_skipped(self) -> list[int]:
        """Corrupt documents that were left out so far, of each source."""
        return self._corrupt.num_skipped

    def of(self, step: RankStep) -> Amounts:
        """What is left of a step; every rank of the job must call this.

        Raises:
            ValueError: too many corrupt documents in a row, or a source that failed has left no
                loss token in the step.
        """
        self._lost.tell(step.totals)
        corrupt_ids = [i for one in step.micro_batches for i in one.corrupt_ids]
        any_corrupt, any_lost = largest([len(corrupt_ids), len(step.lost)], compute_device())
        amounts = step.totals.amounts
        lost_ids = set()
        if any_lost:
            lost = self._lost.drop(step)
            lost_ids = {one.sequence_id for one in lost}
            amounts = amounts_without(amounts, lost)
            _require_loss(step, amounts, len(lost))
        if any_corrupt:
            mine = [i for i in corrupt_ids if i not in lost_ids]
            amounts = amounts_without(amounts, self._corrupt.drop(step, mine))
        else:
            self._corrupt.none_found()
        return amounts


def _require_loss(step: RankStep, amounts: Amounts, num_lost: int) -> None:
    if amounts.loss_tokens:
        return
    raise ValueError(
        f"found no token with loss in step {step.totals.before.steps + 1} once the {num_lost:,} of "
        f"its {step.totals.sequences:,} sequences are left out whose source failed, expected at "
        "least one: the lines above name the source and why; start the job again when it can be "
        "read, or make the global batch larger"
    )

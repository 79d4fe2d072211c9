"""Documents with tokens outside the vocabulary: each costs itself, many in a row stop the run."""

from __future__ import annotations

import torch.distributed as dist

from megatron_hdp.data.mixture import Corpus, Step
from megatron_hdp.megatron.parallel import say
from megatron_hdp.megatron.step.preparation import PreparedStep


class CorruptDocuments:
    """Takes corrupt sequences out of steps, counts them, and knows when there are too many.

    A sequence may be read by several ranks, so all of them must hear of what one of them found:
    the loss tokens of the whole sequence leave the global batch. Which sequences these are depends
    on the data alone, so every parallel layout trains the same steps.

    Attributes:
        num_skipped: sequences taken out so far, of each source.
    """

    def __init__(self, corpus: Corpus, vocab_size: int, limit: int) -> None:
        self.num_skipped = [0] * len(corpus.sources)
        self._corpus = corpus
        self._vocab_size = vocab_size
        self._limit = limit
        self._in_a_row: list[str] = []

    def drop(self, prepared: PreparedStep) -> list[int]:
        """Takes the corrupt sequences, wherever they were found, out of this rank's micro-batches.

        Every rank of the job must call this.

        Returns:
            Their places in the step, alike on every rank.

        Raises:
            ValueError: more corrupt documents in a row than the limit.
        """
        mine = sorted({i for one in prepared.micro_batches for i in one.corrupt_ids})
        found: list[list[int]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(found, mine)
        corrupt = {i for one in found for i in one}
        for micro_batch in prepared.micro_batches:
            micro_batch.drop(corrupt)
        for i in range(len(prepared.step)):
            self._note(prepared.step, i, i in corrupt)
        return sorted(corrupt)

    def none_found(self) -> None:
        """Notes a step without corrupt sequences."""
        self._in_a_row.clear()

    def _note(self, step: Step, i: int, is_corrupt: bool) -> None:
        if not is_corrupt:
            self._in_a_row.clear()
            return
        document = self._corpus.words_for(step, [i])
        expected = f"token ids from 0 to {self._vocab_size - 1}, the tokenizer's"
        self._in_a_row.append(document)
        if len(self._in_a_row) > self._limit:
            raise ValueError(
                f"{len(self._in_a_row)} corrupt documents in a row: "
                f"{', '.join(self._in_a_row)}; expected {expected}: "
                "train with the tokenizer that made the data, make the data again, or raise "
                "--hdp-corrupt-limit"
            )
        self.num_skipped[int(step.sources[i])] += 1
        say(
            f"skipped corrupt {document} (expected {expected}); {sum(self.num_skipped)} skipped so "
            "far"
        )

"""Documents with tokens outside the vocabulary: each costs itself, many in a row stop the run."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_hdp.data.mixture import Corpus
from megatron_hdp.data.steps import RankStep
from megatron_hdp.megatron.parallel import say
from megatron_hdp.megatron.step.left_out import LeftOut, found_by_all


class CorruptDocuments:
    """Takes corrupt sequences out of steps, counts them, and knows when there are too many.

    Which sequences these are depends on the data alone, so every parallel layout trains the same
    steps.

    Attributes:
        num_skipped: sequences taken out so far, of each source.
    """

    def __init__(self, corpus: Corpus, vocab_size: int, limit: int) -> None:
        self.num_skipped = [0] * len(corpus.sources)
        self._corpus = corpus
        self._vocab_size = vocab_size
        self._limit = limit
        self._in_a_row: list[str] = []

    def drop(self, step: RankStep, sequence_ids: Iterable[int]) -> list[LeftOut]:
        """Takes the corrupt sequences, wherever they were found, out of this rank's micro-batches.

        Every rank of the job must call this.

        Args:
            step: of this rank.
            sequence_ids: those that it has found.

        Returns:
            Those of the whole step, in its order, alike on every rank.

        Raises:
            ValueError: more corrupt documents in a row than the limit.
        """
        corrupt = found_by_all(step, sequence_ids)
        first_good = 0  # of the places behind the latest corrupt one
        for one in corrupt:
            if one.sequence_id > first_good:
                self._in_a_row.clear()
            first_good = one.sequence_id + 1
            self._note(one)
        if first_good < step.totals.sequences:
            self._in_a_row.clear()
        return corrupt

    def none_found(self) -> None:
        """Notes a step without corrupt sequences."""
        self._in_a_row.clear()

    def _note(self, one: LeftOut) -> None:
        document = self._corpus.words_for([one.source], [one.row])
        expected = f"token ids from 0 to {self._vocab_size - 1}, the tokenizer's"
        self._in_a_row.append(document)
        if len(self._in_a_row) > self._limit:
            raise ValueError(
                f"{len(self._in_a_row)} corrupt documents in a row: "
                f"{', '.join(self._in_a_row)}; expected {expected}: "
                "train with the tokenizer that made the data, make the data again, or raise "
                "--hdp-corrupt-limit"
            )
        self.num_skipped[one.source] += 1
        say(
            f"skipped corrupt {document} (expected {expected}); {sum(self.num_skipped)} skipped so "
            "far"
        )

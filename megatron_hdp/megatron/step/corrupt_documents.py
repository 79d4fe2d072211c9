"""Documents with tokens outside the vocabulary: each costs itself, many in a row stop the run."""

from __future__ import annotations

import numpy as np
import torch.distributed as dist

from megatron_hdp.data.index_file import Int64Array
from megatron_hdp.data.tables import SequenceTable
from megatron_hdp.megatron.parallel import say
from megatron_hdp.megatron.step.preparation import PreparedStep


class CorruptDocuments:
    """Takes corrupt sequences out of steps, counts them, and knows when there are too many.

    A sequence may be read by several ranks, so all of them must hear of what one of them found:
    the loss tokens of the whole sequence leave the global batch. Which sequences these are depends
    on the data alone, so every parallel layout trains the same steps.

    Attributes:
        num_skipped: sequences taken out so far.
    """

    def __init__(self, table: SequenceTable, prefix: str, vocab_size: int, limit: int) -> None:
        self.num_skipped = 0
        self._table = table
        self._prefix = prefix
        self._vocab_size = vocab_size
        self._limit = limit
        self._in_a_row: list[int] = []

    def drop(self, prepared: PreparedStep) -> Int64Array:
        """Takes the corrupt sequences, wherever they were found, out of this rank's micro-batches.

        Every rank of the job must call this.

        Returns:
            Rows of the sequence table, alike on every rank.

        Raises:
            ValueError: more corrupt documents in a row than the limit.
        """
        mine = sorted({row for one in prepared.micro_batches for row in one.corrupt_ids})
        found: list[list[int]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(found, mine)
        rows = {row for one in found for row in one}
        for micro_batch in prepared.micro_batches:
            micro_batch.drop(rows)
        for row in prepared.step.sequences.tolist():
            self._note(row, row in rows)
        return np.array(sorted(rows), dtype=np.int64)

    def none_found(self) -> None:
        """Notes a step without corrupt sequences."""
        self._in_a_row.clear()

    def _note(self, row: int, is_corrupt: bool) -> None:
        if not is_corrupt:
            self._in_a_row.clear()
            return
        document = int(self._table.documents(np.array([row]))[0])
        expected = f"token ids from 0 to {self._vocab_size - 1}, the tokenizer's"
        self._in_a_row.append(document)
        if len(self._in_a_row) > self._limit:
            raise ValueError(
                f"{len(self._in_a_row)} corrupt documents in a row: "
                f"{', '.join(map(str, self._in_a_row))} of {self._prefix}; expected {expected}: "
                "train with the tokenizer that made the data, make the data again, or raise "
                "--hdp-corrupt-limit"
            )
        self.num_skipped += 1
        say(
            f"skipped corrupt document {document} of {self._prefix} (expected {expected}); "
            f"{self.num_skipped} skipped so far"
        )

"""Which sequences form step k: a function of the data, the seed and the consumed count only.

Neither the number of ranks nor the strategy enters, so a job restarted on another number of ranks
sees the same steps.
"""

from dataclasses import dataclass

import numpy as np

from megatron_hdp.data.index_file import Int64Array
from megatron_hdp.data.sequences import Sequences
from megatron_hdp.data.shuffles import LATEST_ORDER, Shuffle, TableOrder, shuffle_of

_MAX_SEED = 2**64 - 1


@dataclass(frozen=True)
class Step:
    """The sequences of one global batch."""

    sequences: Int64Array
    """Rows of the sequence table, in the order in which they were drawn."""
    consumed_before: int
    """Sequences drawn before this step, over all epochs."""
    consumed_after: int
    """Sequences drawn up to and including this step: where the next one begins."""
    tokens: int
    """Tokens of all sequences, padding not counted."""
    epoch: int
    """Epoch of the first sequence."""


class StepSampler:
    """Draws global batches from an endless chain of epochs, each its own permutation."""

    def __init__(
        self,
        table: Sequences,
        *,
        seed: int,
        global_batch_size: int | None = None,
        global_batch_tokens: int | None = None,
        shuffle: bool = True,
        order_version: int = LATEST_ORDER,
    ) -> None:
        """Set the size of a global batch, either in sequences or in tokens.

        Args:
            table: the sequences to draw from.
            seed: chooses the permutations; 0 to 2^64 - 1.
            global_batch_size: sequences of a step.
            global_batch_tokens: a step takes sequences until the next one would exceed this many
                tokens; at least one.
            shuffle: ``False`` keeps the table's order in every epoch.
            order_version: how permutations are made, see `shuffles`.

        Raises:
            ValueError: no sequences, a seed or version out of range, or not exactly one positive
                batch size.
        """
        if len(table) == 0:
            raise ValueError("no sequence to draw from: the sequence table is empty")
        if not 0 <= seed <= _MAX_SEED:
            raise ValueError(f"the seed is {seed}, expected 0 to {_MAX_SEED}: change --seed")
        _check_batch(global_batch_size, global_batch_tokens)
        self._table = table
        self._batch_size = global_batch_size
        self._batch_tokens = global_batch_tokens
        self._shuffle: Shuffle = (
            shuffle_of(order_version, len(table), seed) if shuffle else TableOrder()
        )

    def step(self, consumed: int) -> Step:
        """Return the step that begins after ``consumed`` sequences; any count may be asked for."""
        if consumed < 0:
            raise ValueError(f"{consumed} consumed sequences, expected 0 or more")
        if self._batch_size is not None:
            sequences = self._take(consumed, self._batch_size)
        else:
            assert self._batch_tokens is not None
            sequences = self._take_tokens(consumed, self._batch_tokens)
        return Step(
            sequences=sequences,
            consumed_before=consumed,
            consumed_after=consumed + len(sequences),
            tokens=int(self._table.lengths(sequences).sum()),
            epoch=consumed // len(self._table),
        )

    def _take(self, consumed: int, count: int) -> Int64Array:
        """Return the ``count`` sequences after ``consumed``, across epoch borders."""
        num_sequences = len(self._table)
        parts = []
        while count > 0:
            epoch, first = divmod(consumed, num_sequences)
            part = self._shuffle.rows(epoch, first, min(count, num_sequences - first))
            parts.append(part)
            consumed, count = consumed + len(part), count - len(part)
        return np.concatenate(parts)

    def _take_tokens(self, consumed: int, budget: int) -> Int64Array:
        """Return the sequences after ``consumed`` that fit the token budget, at least one."""
        parts = [self._take(consumed, 1)]
        budget -= int(self._table.lengths(parts[0])[0])
        consumed += 1
        while budget > 0:
            candidates = self._take(consumed, int(budget / self._table.mean_length) + 1)
            totals = np.cumsum(self._table.lengths(candidates))
            num_fit = int(np.searchsorted(totals, budget, side="right"))
            if num_fit:
                parts.append(candidates[:num_fit])
                budget -= int(totals[num_fit - 1])
                consumed += num_fit
            if num_fit < len(candidates):
                break
        return np.concatenate(parts)


def _check_batch(global_batch_size: int | None, global_batch_tokens: int | None) -> None:
    sizes = [size for size in (global_batch_size, global_batch_tokens) if size is not None]
    if len(sizes) != 1 or sizes[0] < 1:
        raise ValueError(
            f"global batch of {global_batch_size} sequences and {global_batch_tokens} tokens: give "
            "exactly one, at least 1 (--global-batch-size or --hdp-global-batch-tokens)"
        )

"""Which sequences form step k: a function of the data, the seed and the consumed count only.

Neither the number of ranks nor the strategy enters, so a job restarted on another number of ranks
sees the same steps.
"""

from dataclasses import dataclass

import numpy as np

from megatron_hdp.data.index_file import Int64Array

_CACHED_EPOCHS = 2


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
        lengths: Int64Array,
        *,
        seed: int,
        global_batch_size: int | None = None,
        global_batch_tokens: int | None = None,
        shuffle: bool = True,
    ) -> None:
        """Set the size of a global batch, either in sequences or in tokens.

        Args:
            lengths: ``int64[n]``, tokens of each sequence of the table.
            seed: chooses the permutations; at least 0.
            global_batch_size: sequences of a step.
            global_batch_tokens: a step takes sequences until the next one would exceed this many
                tokens; at least one.
            shuffle: ``False`` keeps the table's order in every epoch.

        Raises:
            ValueError: no sequences, a negative seed, or not exactly one positive batch size.
        """
        if len(lengths) == 0:
            raise ValueError("no sequence to draw from: the sequence table is empty")
        if seed < 0:
            raise ValueError(f"the seed is {seed}, expected 0 or more: change --seed")
        _check_batch(global_batch_size, global_batch_tokens)
        self._lengths = np.asarray(lengths, dtype=np.int64)
        self._mean_length = float(self._lengths.mean())
        self._seed = seed
        self._batch_size = global_batch_size
        self._batch_tokens = global_batch_tokens
        self._shuffle = shuffle
        self._orders: dict[int, Int64Array] = {}

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
            tokens=int(self._lengths[sequences].sum()),
            epoch=consumed // len(self._lengths),
        )

    def _take(self, consumed: int, count: int) -> Int64Array:
        """Return the ``count`` sequences after ``consumed``, across epoch borders."""
        parts = []
        while count > 0:
            epoch, offset = divmod(consumed, len(self._lengths))
            part = self._order(epoch)[offset : offset + count]
            parts.append(part)
            consumed, count = consumed + len(part), count - len(part)
        return np.concatenate(parts)

    def _take_tokens(self, consumed: int, budget: int) -> Int64Array:
        """Return the sequences after ``consumed`` that fit the token budget, at least one."""
        parts = [self._take(consumed, 1)]
        budget -= int(self._lengths[parts[0][0]])
        consumed += 1
        while budget > 0:
            candidates = self._take(consumed, int(budget / self._mean_length) + 1)
            totals = np.cumsum(self._lengths[candidates])
            num_fit = int(np.searchsorted(totals, budget, side="right"))
            if num_fit:
                parts.append(candidates[:num_fit])
                budget -= int(totals[num_fit - 1])
                consumed += num_fit
            if num_fit < len(candidates):
                break
        return np.concatenate(parts)

    def _order(self, epoch: int) -> Int64Array:
        """Return the epoch's permutation; the latest few are kept."""
        if epoch not in self._orders:
            while len(self._orders) >= _CACHED_EPOCHS:
                del self._orders[next(iter(self._orders))]
            self._orders[epoch] = self._permutation(epoch)
        return self._orders[epoch]

    def _permutation(self, epoch: int) -> Int64Array:
        num_sequences = len(self._lengths)
        if not self._shuffle:
            return np.arange(num_sequences)
        # numpy keeps a bit generator's stream across releases but not Generator.permutation's:
        # sorting raw draws gives the same steps after a numpy upgrade. The low bits of each draw
        # become its index, which makes all keys distinct and the sort cheaper than an argsort.
        generator = np.random.Philox(np.random.SeedSequence([self._seed, epoch]))
        index_bits = np.uint64((1 << (num_sequences - 1).bit_length()) - 1)
        keys = generator.random_raw(num_sequences) & ~index_bits
        keys |= np.arange(num_sequences, dtype=np.uint64)
        keys.sort()
        keys &= index_bits
        return keys.view(np.int64)


def _check_batch(global_batch_size: int | None, global_batch_tokens: int | None) -> None:
    sizes = [size for size in (global_batch_size, global_batch_tokens) if size is not None]
    if len(sizes) != 1 or sizes[0] < 1:
        raise ValueError(
            f"global batch of {global_batch_size} sequences and {global_batch_tokens} tokens: give "
            "exactly one, at least 1 (--global-batch-size or --hdp-global-batch-tokens)"
        )

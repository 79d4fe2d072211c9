"""Waves of a step: exchanges of rows, each with the items of some slots of micro-batches."""

from collections.abc import Callable

import numpy as np

from megatron_hdp.arrays import Int32Array, Int64Array

# First slots of waves, and last ones, counted from the end.
_ENDS = (((), ()), ((2,), (2,)), ((2, 4), (2, 4)), ((1, 2, 4), (4,)))


def wave_choices(num_slots: int) -> list[Int64Array]:
    """Return ways to cut a step's slots into waves; each has the first slots of its own.

    Slots at the ends are waves of their own: rows of the first are wanted at once, and gradients of
    the last come when nobody has time. The more waves, the fewer items each has to deal evenly.
    """
    doubled = tuple(2**i for i in range(num_slots.bit_length()) if 2 ** (i + 1) <= num_slots)
    found: dict[tuple[int, ...], Int64Array] = {}
    for front, back in (*_ENDS, (doubled, doubled)):
        starts = {0, *front, *(num_slots - one for one in back)}
        kept = tuple(sorted(one for one in starts if 0 <= one < num_slots))
        found[kept] = np.array(kept, dtype=np.int64)
    return list(found.values())


def even_starts(num_slots: int, num_waves: int) -> Int64Array:
    """Return the first slot of each of so many waves of equally many slots, of one each at least.

    Args:
        num_slots: micro-batches of the rank that has most.
        num_waves: that are wanted, from 1 on.
    """
    num_waves = max(1, min(num_waves, num_slots))
    return np.arange(num_waves, dtype=np.int64) * num_slots // num_waves


def fitting_starts(
    starts: Int64Array, num_slots: int, rows_of: Callable[[int, int], int], most: int
) -> Int64Array:
    """Return the first slot of each of the fewest waves within given ones that have few rows.

    Args:
        starts: of the waves that are cut further.
        num_slots: micro-batches of the rank that has most.
        rows_of: rows of a wave of slots ``[begin, end)``, on the rank that has most of them.
        most: of these rows.

    Raises:
        ValueError: one slot alone has more.
    """
    found = []
    for begin, end in zip(starts.tolist(), [*starts[1:].tolist(), num_slots], strict=True):
        found.append(begin)
        if rows_of(begin, end) <= most:
            continue
        for slot in range(begin, end):
            if slot > found[-1] and rows_of(found[-1], slot + 1) > most:
                found.append(slot)
            if slot == found[-1] and (rows := rows_of(slot, slot + 1)) > most:
                raise ValueError(
                    f"found {rows:,} rows of items in micro-batch {slot} that one rank wants or "
                    f"makes, expected at most {most:,}, as --hdp-encoder-rows says: raise it, or "
                    "lower --hdp-tokens-per-rank so that micro-batches are smaller"
                )
    return np.array(found, dtype=np.int64)


def waves_of(slots: Int32Array, starts: Int64Array) -> Int32Array:
    """Return the wave of each item, of those waves that have some, ``[items]``.

    Args:
        slots: of each item's first micro-batch, ``[items]``.
        starts: of waves, the first one's 0.
    """
    found = np.searchsorted(starts, slots, side="right") - 1
    return np.unique(found, return_inverse=True)[1].astype(np.int32)

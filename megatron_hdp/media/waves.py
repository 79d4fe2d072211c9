"""Waves of a step: exchanges of rows, each with the items of some slots of micro-batches."""

from collections.abc import Callable

import numpy as np

from megatron_hdp.arrays import Int32Array, Int64Array


def wave_starts(num_slots: int, stages: int) -> Int64Array:
    """Return the first slot of each wave, where ranks of late stages wait in the pipeline's ends.

    Waves are short at both ends of the step, where ranks wait, and each twice as long as its
    neighbour towards the middle: about 2 log2 of the slots. Without stages there is one.

    Args:
        num_slots: micro-batches of the rank that has most.
        stages: of the pipeline.
    """
    if stages == 1:
        return np.zeros(1, dtype=np.int64)
    distances = [0]
    while (distance := max(1, 2 * distances[-1])) <= num_slots // 2:
        distances.append(distance)
    found = {*distances, *(num_slots - one for one in distances[1:])}
    return np.array(sorted(found), dtype=np.int64)


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

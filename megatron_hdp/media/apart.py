"""Has micro-batches with large items run in the middle of a pipeline's step.

Rows of a step's first micro-batches are wanted at once, and gradients of its last ones come when no
rank waits any more: a large item there makes the step longer, in the middle it takes no time.
"""

import numpy as np

from megatron_hdp.arrays import Float64Array, Int64Array
from megatron_hdp.media.gaps import slots_of_micro_batches
from megatron_hdp.planner import Plan
from megatron_hdp.planner.pipeline import Pipeline

_ALIKE = 1.03
"""Micro-batches whose times differ by no more may change places."""


def with_items_apart(
    plan: Plan,
    durations_s: Float64Array,
    largest: Int64Array,
    pipeline: Pipeline,
    lockstep_ranks: int = 1,
) -> Plan:
    """Return the plan with sequences of micro-batches exchanged that run on the same ranks alike.

    Args:
        plan: of a step's sequences.
        durations_s: of its micro-batches, ``[micro-batches]``.
        largest: patches of each sequence's largest item, 0 without any, ``[sequences]``.
        pipeline: that each rank is.
        lockstep_ranks: HDP ranks that share experts.
    """
    numbers = np.arange(plan.num_micro_batches)
    found = np.zeros(len(numbers), dtype=np.int64)
    for offsets, sequences in (
        (plan.sequence_offsets, plan.sequences),
        (plan.local_offsets, plan.local_sequences),
    ):
        np.maximum.at(found, np.repeat(numbers, np.diff(offsets)), largest[sequences])
    slots = slots_of_micro_batches(plan, pipeline, lockstep_ranks)
    lasts = np.zeros(plan.num_ranks, dtype=np.int64)
    np.maximum.at(lasts, plan.ranks, np.repeat(slots, np.diff(plan.rank_offsets)))
    from_ends = np.minimum(slots, lasts[plan.ranks[plan.rank_offsets[:-1]]] - slots)
    contents = numbers.copy()
    for alike in _alike(plan, durations_s):
        if found[alike].any():
            places = alike[np.lexsort((slots[alike], from_ends[alike]))]
            contents[places] = alike[np.lexsort((slots[alike], found[alike]))]
    return plan.with_contents(contents)


def _alike(plan: Plan, durations_s: Float64Array) -> list[Int64Array]:
    """Return micro-batches that may change places: on the same ranks, in as many parts, as long."""
    kinds: dict[tuple[object, ...], list[int]] = {}
    columns = (plan.parts_of_each, plan.offload_ratios, plan.is_recomputed, plan.is_stream)
    rows = zip(*(one.tolist() for one in columns), strict=True)
    for m, (parts, ratio, is_recomputed, is_stream) in enumerate(rows):
        if ratio or is_stream:  # made for one sequence
            continue
        ring = plan.ranks[plan.rank_offsets[m] : plan.rank_offsets[m + 1]]
        kinds.setdefault((ring.tobytes(), parts, is_recomputed), []).append(m)
    found = []
    for numbers in kinds.values():
        by_time = np.array(numbers)[np.argsort(durations_s[numbers], kind="stable")]
        while len(by_time):
            times_s = durations_s[by_time]
            end = int(np.searchsorted(times_s, _ALIKE * times_s[0], side="right"))
            found.append(by_time[:end])
            by_time = by_time[end:]
    return found

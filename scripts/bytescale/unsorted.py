"""Naive HDP that takes sequences as they come, which the planner's own strategies never do."""

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_hdp.planner import Plan

Int64Array = NDArray[np.int64]


def naive_in_order(lengths: Int64Array, ranks: int, tokens_per_rank: int) -> Plan:
    """Naive HDP without sorting: each sequence, or pack of short ones, as it comes.

    It goes to the ranks with the fewest micro-batches.
    """
    free = [(0, rank) for rank in range(ranks)]
    members: list[list[int]] = []
    sequences: list[list[int]] = []

    def launch(which: list[int], degree: int) -> None:
        taken = [heapq.heappop(free) for _ in range(degree)]
        for count, rank in taken:
            heapq.heappush(free, (count + 1, rank))
        members.append(sorted(rank for _, rank in taken))
        sequences.append(which)

    pack: list[int] = []
    room = tokens_per_rank
    for number, length in enumerate(lengths.tolist()):
        if length > tokens_per_rank:
            launch([number], -(-length // tokens_per_rank))
            continue
        if length > room:
            launch(pack, 1)
            pack, room = [], tokens_per_rank
        pack.append(number)
        room -= length
    if pack:
        launch(pack, 1)
    none = np.zeros(0, dtype=np.int64)
    return Plan(
        num_ranks=ranks,
        tokens_per_rank=tokens_per_rank,
        strategy="naive",
        slice_multiple=1,
        lengths=lengths,
        rank_offsets=_offsets(members),
        ranks=np.concatenate(members).astype(np.int32),
        sequence_offsets=_offsets(sequences),
        sequences=np.concatenate(sequences).astype(np.int64),
        local_offsets=np.zeros(len(members) + 1, dtype=np.int64),
        local_sequences=none,
        local_ranks=none.astype(np.int32),
        offload_ratios=np.zeros(len(members)),
        summary={},
    )


def _offsets(lists: Sequence[Sequence[int]]) -> Int64Array:
    return np.concatenate([[0], np.cumsum([len(one) for one in lists])]).astype(np.int64)

"""Naive HDP that takes sequences as they come, which the planner's own strategies never do."""

import heapq

import numpy as np

from megatron_hdp.arrays import Int64Array
from megatron_hdp.planner import Plan


def naive_in_order(
    lengths: Int64Array, ranks: int, tokens_per_rank: int, sorted_plan: Plan | None = None
) -> Plan:
    """Naive HDP without sorting: each sequence, or pack of short ones, as it comes.

    It goes to the ranks with the fewest micro-batches.

    Args:
        lengths: tokens of each sequence.
        ranks: HDP ranks.
        tokens_per_rank: capacity.
        sorted_plan: naive HDP's of the same sequences with offload; a sequence that has a
            micro-batch of its own there has its ranks and its ratio here. None: no offload.
    """
    degrees, ratios = _offloaded(sorted_plan)
    free = [(0, rank) for rank in range(ranks)]
    members: list[list[int]] = []
    sequences: list[list[int]] = []
    offloaded: list[float] = []

    def launch(which: list[int], degree: int) -> None:
        taken = [heapq.heappop(free) for _ in range(degree)]
        for count, rank in taken:
            heapq.heappush(free, (count + 1, rank))
        members.append(sorted(rank for _, rank in taken))
        sequences.append(which)
        offloaded.append(ratios.get(which[0], 0.0))

    pack: list[int] = []
    room = tokens_per_rank
    for number, length in enumerate(lengths.tolist()):
        if length > tokens_per_rank:
            launch([number], degrees.get(number, -(-length // tokens_per_rank)))
            continue
        if length > room:
            launch(pack, 1)
            pack, room = [], tokens_per_rank
        pack.append(number)
        room -= length
    if pack:
        launch(pack, 1)
    return Plan(
        num_ranks=ranks,
        tokens_per_rank=tokens_per_rank,
        strategy="naive",
        lengths=lengths,
        rank_offsets=np.cumsum([0, *map(len, members)]),
        ranks=np.concatenate(members),
        sequence_offsets=np.cumsum([0, *map(len, sequences)]),
        sequences=np.concatenate(sequences),
        local_offsets=np.zeros(len(members) + 1),
        local_sequences=[],
        local_ranks=[],
        offload_ratios=offloaded,
    )


def _offloaded(plan: Plan | None) -> tuple[dict[int, int], dict[int, float]]:
    """Degree and ratio of each sequence that is offloaded."""
    degrees, ratios = {}, {}
    for place in np.flatnonzero(plan.offload_ratios) if plan is not None else ():
        batch = plan.micro_batch(int(place))
        degrees[batch.sequences[0]] = len(batch.ranks)
        ratios[batch.sequences[0]] = batch.offload_ratio
    return degrees, ratios

"""Slots: which micro-batch each rank runs at which position when positions must agree.

Pipelines need every micro-batch at one position in the lists of all its ranks (design rule 3), and
ranks that exchange tokens with their experts must also run equally many. Where a plan does not give
that by itself, ranks run padding in between. Stages of several model chunks (the interleaved
schedule) take micro-batches in groups of as many as there are stages; padding fills the last one.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_hdp.arrays import BoolArray, Int64Array
from megatron_hdp.planner.pipeline import Pipeline
from megatron_hdp.planner.problem import Problem
from megatron_hdp.planner.types import Plan
from megatron_hdp.strategies import BY_NAME

PADDING = -1


def planned_for(strategy: str, problem: Problem) -> Problem:
    """The problem that a run's strategy plans; one for simulator and training.

    A strategy that knows nothing of pipelines plans for one stage: with more the planner would
    refuse most of its plans, which `slots` aligns; what such a plan promises counts no ramp.
    """
    if knows_stages(strategy):
        return problem
    return replace(problem, pipeline=Pipeline(), sequence_parts=1)


def knows_stages(strategy: str) -> bool:
    """Whether a strategy plans for pipeline stages."""
    known = BY_NAME.get(strategy)
    return known is None or known.on_pipelines  # None: "auto", which is one that plans for them


def slots(
    plan: Plan, *, aligned: bool, lockstep_ranks: int = 1, group_size: int = 1
) -> list[Int64Array]:
    """What each rank runs, position by position; at least one micro-batch or padding each.

    Args:
        plan: the plan.
        aligned: put each micro-batch at one position in the lists of all its ranks: the plan's,
            if it has positions.
        lockstep_ranks: this many consecutive ranks each run equally many positions; above 1 needs
            ``aligned``.
        group_size: each rank's count is a multiple of it, see `Pipeline.group_size`.

    Returns:
        One ``int64`` array a rank: micro-batches of the plan in its order, or `PADDING`.
    """
    if lockstep_ranks > 1 and not aligned:
        raise ValueError(f"{lockstep_ranks} ranks in lockstep need aligned positions")
    if plan.num_ranks % lockstep_ranks:
        raise ValueError(f"{plan.num_ranks} ranks are no multiple of {lockstep_ranks} in lockstep")
    lists = [plan.micro_batches_of(rank) for rank in range(plan.num_ranks)]
    if aligned and plan.positions is not None:
        lists = [_placed(one, plan.positions[one]) for one in lists]
    elif aligned and not _are_aligned(plan, lists):
        lists = _aligned(plan)
    counts = np.array([max(len(one), 1) for one in lists])
    counts = -(-counts // group_size) * group_size
    wanted = counts.reshape(-1, lockstep_ranks).max(axis=1).repeat(lockstep_ranks)
    return [
        np.concatenate([one, np.full(count - len(one), PADDING)]).astype(np.int64)
        for one, count in zip(lists, wanted.tolist(), strict=True)
    ]


def stands_in_place(plan: Plan) -> bool:
    """Whether every micro-batch stands at one position in its ranks' lists, without padding."""
    lists = [plan.micro_batches_of(rank) for rank in range(plan.num_ranks)]
    return plan.positions is None and _are_aligned(plan, lists)


def padding_parts(
    plan: Plan, slots: Sequence[Int64Array], *, lockstep_ranks: int = 1
) -> list[Int64Array]:
    """How many parts of padding each rank runs behind its own in each slot.

    Ranks in lockstep meet in every part: each runs as many as the one of them that has most.
    """
    parts = [parts_of(plan, one) for one in slots]
    found: list[Int64Array] = []
    for begin in range(0, len(parts), lockstep_ranks):
        together = np.stack(parts[begin : begin + lockstep_ranks])
        found += list(together.max(axis=0) - together)
    return found


def streams_of(
    plan: Plan, slots: Sequence[Int64Array], *, lockstep_ranks: int = 1
) -> list[Int64Array]:
    """1 where what a rank runs in a slot streams, else 0.

    Ranks in lockstep meet in both forwards of a stream: each streams where one of them does, and
    with it the other members of its ring.
    """
    of_each = np.append(plan.is_stream, False).astype(np.int64)
    assert PADDING == -1, "it stands last"
    while True:
        found: list[Int64Array] = []
        for begin in range(0, len(slots), lockstep_ranks):
            alongside = np.stack(slots[begin : begin + lockstep_ranks])
            together: Int64Array = of_each[alongside].max(axis=0)
            found += [together] * lockstep_ranks
        those = [here[streams > 0] for here, streams in zip(slots, found, strict=True)]
        micro_batches = np.concatenate(those)
        micro_batches = micro_batches[micro_batches != PADDING]
        if of_each[micro_batches].all():
            return found
        of_each[micro_batches] = 1


def beside_streams(
    plan: Plan, slots: Sequence[Int64Array], *, lockstep_ranks: int = 1
) -> tuple[Plan, list[BoolArray]]:
    """The plan whose micro-batches beside streams are recomputed; and which slots run twice."""
    if plan.streams is None:
        return plan, [np.zeros(len(one), dtype=np.bool_) for one in slots]
    twice = [one > 0 for one in streams_of(plan, slots, lockstep_ranks=lockstep_ranks)]
    these = np.concatenate([one[here] for one, here in zip(slots, twice, strict=True)])
    recomputed = plan.is_recomputed.copy()
    recomputed[these[these != PADDING]] = True
    return replace(plan, recomputed=recomputed & ~plan.streams), twice


def parts_of(plan: Plan, slots: Int64Array) -> Int64Array:
    """In how many parts each slot's micro-batch runs; padding in one."""
    of_each = np.append(plan.parts_of_each, 1)
    assert PADDING == -1, "it stands last"
    return of_each[slots]


def _placed(micro_batches: Int64Array, positions: Int64Array) -> Int64Array:
    """A rank's list with padding in front of what stands at a later position."""
    found = np.full(int(positions.max(initial=-1)) + 1, PADDING, dtype=np.int64)
    found[positions] = micro_batches
    return found


def _are_aligned(plan: Plan, lists: list[Int64Array]) -> bool:
    position = np.full(plan.num_micro_batches, PADDING)
    for one in lists:
        seen = position[one]
        here = np.arange(len(one))
        if ((seen != PADDING) & (seen != here)).any():
            return False
        position[one] = here
    return True


def _aligned(plan: Plan) -> list[Int64Array]:
    """Each micro-batch at the first position that is free on all of its ranks and behind theirs."""
    lists: list[list[int]] = [[] for _ in range(plan.num_ranks)]
    for m in range(plan.num_micro_batches):
        ranks = plan.ranks[plan.rank_offsets[m] : plan.rank_offsets[m + 1]].tolist()
        position = max(len(lists[rank]) for rank in ranks)
        for rank in ranks:
            lists[rank] += [PADDING] * (position - len(lists[rank])) + [m]
    return [np.array(one, dtype=np.int64) for one in lists]


def begin_together(plan: Plan, slots: Sequence[Int64Array]) -> bool:
    """Whether all members of the ring of any rank's first slot are in their first one, too.

    Then no rank waits in its first forward pass for one that is in another micro-batch, and ranks
    may meet in other collectives layer by layer.
    """
    first = np.array([one[0] for one in slots])
    owners = np.repeat(np.arange(plan.num_micro_batches), np.diff(plan.rank_offsets))
    is_first = np.isin(owners, first)
    return bool((first[plan.ranks[is_first]] == owners[is_first]).all())


def end_together(plan: Plan, slots: Sequence[Int64Array], *, lockstep_ranks: int = 1) -> BoolArray:
    """Of each rank, whether all that wait for it in its last slot are in their last one, too.

    That is, its ring's members and in lockstep the ranks beside it, and those that wait for them in
    turn. Only such a rank may start to reduce gradients inside of its last backward. A reduction
    runs on its device until every rank has begun it; meanwhile the rank still owes its ring what it
    sends in earlier layers. Should its driver wait for the device in between, to get memory or to
    load a kernel, it would send nothing more: a member that has other micro-batches left would
    never begin the reduction, and all would hang.
    """
    last = np.array([one[-1] for one in slots])
    owners = np.repeat(np.arange(plan.num_micro_batches), np.diff(plan.rank_offsets))
    members, begins = plan.ranks, plan.rank_offsets[:-1]

    def of_rings(of_members: BoolArray) -> BoolArray:
        """Of each rank, whether it is true of all members of its last ring."""
        whole = np.append(np.logical_and.reduceat(of_members, begins), True)
        return whole[np.where(last == PADDING, plan.num_micro_batches, last)]

    if not plan.num_micro_batches:
        return np.ones(plan.num_ranks, dtype=np.bool_)
    found = of_rings(last[members] == owners)
    while True:
        beside = found.reshape(-1, lockstep_ranks).all(axis=1).repeat(lockstep_ranks)
        later = beside & of_rings(beside[members])
        if np.array_equal(later, found):
            return found
        found = later

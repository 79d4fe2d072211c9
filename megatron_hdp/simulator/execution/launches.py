"""What each rank launches, in order, as the runtime lays a plan out: padding and lockstep included.

A launch is what starts and ends together on all of its ranks: a micro-batch, padding of one rank,
or in lockstep all of them that exchange tokens with the same experts at one position.
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_hdp.arrays import BoolArray, Float64Array, Int64Array
from megatron_hdp.planner import Plan
from megatron_hdp.planner.lockstep import PADDING, beside_streams, slots
from megatron_hdp.planner.pipeline_evaluation import RankLists

_Number = TypeVar("_Number", np.int64, np.float64)


@dataclass(frozen=True, eq=False, kw_only=True)
class Launches:
    """The lists of all ranks; numbers from the plan's micro-batches on are padding."""

    lists: RankLists
    """Of micro-batches and padding."""
    padding_ranks: Int64Array
    """The rank of each padding."""
    is_aligned: bool
    """Whether positions agree; if not, only a rank without a micro-batch has padding."""
    group_of: Int64Array
    """The launch of each micro-batch and padding."""
    plan: Plan
    """In which what runs beside streams is recomputed."""
    runs_twice: BoolArray
    """Of each micro-batch and padding, whether its forward runs once more beside a stream."""

    @property
    def num(self) -> int:
        """Micro-batches and padding."""
        return len(self.group_of)

    @property
    def grouped(self) -> RankLists:
        """The lists of launches."""
        return RankLists(self.group_of[self.lists.micro_batches], self.lists.counts)

    def longest(self, seconds: Float64Array) -> Float64Array:
        """Seconds of each launch, from those of its micro-batches; one row or several."""
        found = np.zeros((*seconds.shape[:-1], int(self.group_of.max(initial=-1)) + 1))
        np.maximum.at(found.T, self.group_of, seconds.T)
        return found


def launches_of(
    plan: Plan, *, aligned: bool, lockstep_ranks: int = 1, group_size: int = 1
) -> Launches:
    """Lay a plan out on its ranks; arguments as of `planner.lockstep.slots`."""
    num = plan.num_micro_batches
    of_ranks = slots(plan, aligned=aligned, lockstep_ranks=lockstep_ranks, group_size=group_size)
    counts = np.array([len(one) for one in of_ranks], dtype=np.int64)
    flat = np.concatenate(of_ranks)
    is_padding = flat == PADDING
    ranks = np.repeat(np.arange(plan.num_ranks), counts)
    flat[is_padding] = num + np.arange(int(is_padding.sum()))
    lists = RankLists(flat, counts)
    total = num + int(is_padding.sum())
    group_of = np.arange(total)
    if lockstep_ranks > 1:
        begin = np.repeat(np.cumsum(counts) - counts, counts)
        position = np.arange(len(flat)) - begin
        domains = position * plan.num_ranks + ranks // lockstep_ranks
        group_of = _joined(flat, domains, total)
    run, twice = beside_streams(plan, of_ranks, lockstep_ranks=lockstep_ranks)
    runs_twice = np.zeros(total, dtype=np.bool_)
    runs_twice[flat] = np.concatenate(twice)
    return Launches(
        lists=lists,
        padding_ranks=ranks[is_padding],
        is_aligned=aligned,
        group_of=group_of,
        plan=run,
        runs_twice=runs_twice,
    )


def by_list(plan: Plan, launches: Launches, of_members: NDArray[_Number]) -> NDArray[_Number]:
    """Numbers of members, one for each of ``plan.ranks``, as entries of all lists; 0 of padding."""
    found = np.zeros(len(launches.lists.micro_batches), dtype=of_members.dtype)
    by_rank = np.argsort(plan.ranks, kind="stable")  # a rank's slots keep the plan's order
    found[launches.lists.micro_batches < plan.num_micro_batches] = of_members[by_rank]
    return found


def _joined(ones: Int64Array, domains: Int64Array, total: int) -> Int64Array:
    """Numbers of groups: those of one domain are in one, and what is in several joins them."""
    parent = list(range(total))

    def root(one: int) -> int:
        while parent[one] != one:
            parent[one] = parent[parent[one]]
            one = parent[one]
        return one

    first: dict[int, int] = {}
    for one, domain in zip(ones.tolist(), domains.tolist(), strict=True):
        here, there = root(one), root(first.setdefault(domain, one))
        parent[max(here, there)] = min(here, there)
    _, group_of = np.unique([root(one) for one in range(total)], return_inverse=True)
    return group_of

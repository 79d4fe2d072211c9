"""Replays a plan of ranks that share experts: at every position a domain waits for all its ranks.

Written apart from the C++ planner, as is ``planner.evaluation``. At position i a domain takes

    T(i) = max over its members (attention + b tokens + exposed traffic + blocks + g)
           + b_experts x all its tokens at i / E

since tokens go to their experts in every layer and come back before the next: all E ranks enter the
exchange together, and each computes its share whoever owns the tokens (experts are taken to get
equally many; of ranks of several speeds the slowest decides). A ring over several domains ties
their positions: they start together and take the time of the slowest.
"""

import dataclasses
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_hdp.planner.bounds import fixed_s, lockstep_bound_s, speeds_of, total_compute_s
from megatron_hdp.planner.cost_model import CostModel
from megatron_hdp.planner.evaluation import Figures, evaluate
from megatron_hdp.planner.lockstep import PADDING, slots
from megatron_hdp.planner.types import Plan

Float64Array = NDArray[np.float64]
Int64Array = NDArray[np.int64]


@dataclass(frozen=True, eq=False, kw_only=True)
class LockstepFigures(Figures):
    """What a plan takes in lockstep. ``busy_s`` counts experts on those that compute them."""

    num_positions: int
    """Of the longest list."""
    padding_share: float
    """Share of the places in all ranks' lists that hold no micro-batch."""
    position_s: Float64Array
    """T of each position of each domain, ``[positions, domains]``; 0 behind a domain's last."""


def figures_in_lockstep(
    plan: Plan, cost_model: CostModel, expert_parallel_size: int
) -> LockstepFigures:
    """The figures of a plan whose ranks share experts.

    Args:
        plan: its positions are taken, or those that `slots` gives it.
        cost_model: ``b`` and ``b_experts`` apart.
        expert_parallel_size: consecutive HDP ranks E of a domain; 1: every rank has all experts.

    Raises:
        ValueError: the ranks are no multiple of E, or the cost model has other ranks' speeds.
    """
    size = expert_parallel_size
    lists = _places(plan, size)
    dense = evaluate(plan, dataclasses.replace(cost_model, b_experts=0.0))
    speeds = speeds_of(cost_model, plan.num_ranks)
    experts_s = _experts_s(plan, lists, cost_model, speeds, size)
    with_padding = np.append(dense.duration_s, 0.0)
    member_s = np.where(
        lists == PADDING,
        (fixed_s(np.ones(1), cost_model) / speeds)[:, None],
        with_padding[lists],
    )
    counts = (lists != _BEHIND).sum(axis=1)
    member_s[lists == _BEHIND] = 0.0
    slowest_s = member_s.reshape(-1, size, lists.shape[1]).max(axis=1).T
    position_s = slowest_s + experts_s
    busy_s = dense.busy_s + experts_s.sum(axis=0).repeat(size)
    busy_s.setflags(write=False)
    values = {field.name: getattr(dense, field.name) for field in dataclasses.fields(Figures)}
    return LockstepFigures(
        **values
        | {
            "busy_s": busy_s,
            "makespan_s": _makespan_s(plan, lists, position_s, size),
            "total_compute_s": total_compute_s(plan.lengths, cost_model),
            "lower_bound_s": lockstep_bound_s(plan.lengths, plan.num_ranks, cost_model, size),
            "pipeline_bound_s": lockstep_bound_s(plan.lengths, plan.num_ranks, cost_model, size),
        },
        num_positions=int(counts.max()),
        padding_share=float((lists == PADDING).sum() / counts.sum()),
        position_s=position_s,
    )


_BEHIND = -2
"""Behind a list's end."""


def _places(plan: Plan, size: int) -> Int64Array:
    """The lists of all ranks, ``[ranks, positions]``: micro-batches, `PADDING` or `_BEHIND`."""
    lists = slots(plan, aligned=True, lockstep_ranks=size)
    found = np.full((plan.num_ranks, max(map(len, lists))), _BEHIND, dtype=np.int64)
    for rank, one in enumerate(lists):
        found[rank, : len(one)] = one
    return found


def _experts_s(
    plan: Plan, lists: Int64Array, cost_model: CostModel, speeds: Float64Array, size: int
) -> Float64Array:
    """Experts' time of each position of each domain, ``[positions, domains]``."""
    tokens = np.zeros((lists.shape[1], plan.num_ranks // size))
    position = np.zeros(plan.num_micro_batches, dtype=np.int64)
    ranks, places = np.nonzero(lists >= 0)
    position[lists[ranks, places]] = places
    degrees = np.diff(plan.rank_offsets)
    sharded = np.zeros(plan.num_micro_batches)
    of_sequences = np.repeat(np.arange(plan.num_micro_batches), np.diff(plan.sequence_offsets))
    np.add.at(sharded, of_sequences, plan.lengths[plan.sequences])
    owners = np.repeat(np.arange(plan.num_micro_batches), degrees)
    np.add.at(tokens, (position[owners], plan.ranks // size), (sharded / degrees)[owners])
    local = np.repeat(np.arange(plan.num_micro_batches), np.diff(plan.local_offsets))
    where = (position[local], plan.local_ranks // size)
    np.add.at(tokens, where, plan.lengths[plan.local_sequences])
    slowest: Float64Array = speeds.reshape(-1, size).min(axis=1)
    seconds: Float64Array = cost_model.b_experts * tokens / size / slowest
    return seconds


def _makespan_s(plan: Plan, lists: Int64Array, position_s: Float64Array, size: int) -> float:
    """Runs the positions one after the other; domains that a ring ties wait for each other."""
    ties: dict[int, list[set[int]]] = {}
    starts, ends = plan.rank_offsets[:-1], plan.rank_offsets[1:]
    for m in np.flatnonzero(ends - starts > 1).tolist():
        members = plan.ranks[starts[m] : ends[m]]
        domains = set((members // size).tolist())
        if len(domains) > 1:
            place = int(np.flatnonzero(lists[members[0]] == m)[0])
            ties.setdefault(place, []).append(domains)
    clocks = np.zeros(position_s.shape[1])
    for place, seconds in enumerate(position_s):
        together = _joined(ties.get(place, []))
        tied = {domain for group in together for domain in group}
        alone = np.array([d for d in range(len(clocks)) if d not in tied], dtype=np.int64)
        clocks[alone] += seconds[alone]
        for group in together:
            members = np.array(sorted(group))
            clocks[members] = clocks[members].max() + seconds[members].max()
    return float(clocks.max())


def _joined(groups: list[set[int]]) -> list[set[int]]:
    """Groups that share a domain, as one."""
    found: list[set[int]] = []
    for group in groups:
        merged = set(group)
        for other in [one for one in found if one & merged]:
            merged |= other
            found.remove(other)
        found.append(merged)
    return found

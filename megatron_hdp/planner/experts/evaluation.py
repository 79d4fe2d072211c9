"""Replays a plan of ranks that share experts: at every position a domain waits for all its ranks.

Written apart from the C++ planner, as is ``planner.evaluation``. At position i a domain takes

    T(i) = max over its members (attention + b tokens + exposed traffic + blocks + g)
           + b_experts x all its tokens at i / E

since tokens go to their experts in every layer and come back before the next: all E ranks enter the
exchange together, and each computes its share whoever owns the tokens (experts are taken to get
equally many; of ranks of several speeds the slowest decides). A ring over several domains ties
their positions: they start together and take the time of the slowest. In parts a position runs
in as many as the micro-batch of it that has most. Where one of it streams, all of it is computed
twice, padding and experts included.

So what runs are positions of domains. They are replayed as the micro-batches of a plan whose ranks
are the domains; with stages each domain is a pipeline, and each stage takes its share of T.
"""

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from megatron_hdp.arrays import Float64Array, Int64Array
from megatron_hdp.planner.bounds import (
    fixed_s,
    lockstep_bound_s,
    speeds_of,
    total_compute_s,
)
from megatron_hdp.planner.cost_model import CostModel
from megatron_hdp.planner.evaluation import Evaluation, evaluate, replay
from megatron_hdp.planner.lockstep import PADDING, beside_streams, slots
from megatron_hdp.planner.pipeline import Pipeline
from megatron_hdp.planner.pipeline_bounds import pipeline_bound_of, pipeline_target_s
from megatron_hdp.planner.types import Plan

_ONE_STAGE = Pipeline()
_DIRECTIONS = 2  # of what is exchanged: to the experts and back
_PASSES = 2  # as much in forward as in backward
_COMPUTED_TWICE = 4 / 3  # a third of what is computed is forward


def exchanged_bytes_per_token(
    *, values_per_token: int, value_bytes: int, expert_ranks: int
) -> float:
    """Bytes that leave a GPU for a token in all layers: all-to-all, both ways, both passes.

    A token's hidden state goes to each of its experts and one comes back from each; backward as
    many gradients. Experts are taken to get equally many tokens, so that 1 of ``expert_ranks`` of
    all this stays where it is.

    Args:
        values_per_token: that go out in a forward pass: layers x experts of a token x hidden size.
        value_bytes: of one value.
        expert_ranks: GPUs that the experts of a layer are spread over.
    """
    once = values_per_token * value_bytes
    return _DIRECTIONS * _PASSES * once * (expert_ranks - 1) / expert_ranks


@dataclass(frozen=True, eq=False, kw_only=True)
class LockstepFigures(Evaluation):
    """What a plan takes in lockstep. ``busy_s`` counts experts on those that compute them.

    A micro-batch takes ``duration_s``, as all that stands at its position; ``own_s`` counts each
    member's share of what experts compute there.
    """

    num_positions: int
    """Of the longest list."""
    padding_share: float
    """Share of the places in all ranks' lists that hold no micro-batch."""
    position_s: Float64Array
    """T of each position of each domain, ``[positions, domains]``; 0 behind a domain's last."""


def figures_in_lockstep(
    plan: Plan,
    cost_model: CostModel,
    expert_parallel_size: int,
    pipeline: Pipeline = _ONE_STAGE,
) -> LockstepFigures:
    """The figures of a plan whose ranks share experts.

    Args:
        plan: its positions are taken, or those that `slots` gives it.
        cost_model: ``b`` and ``b_experts`` apart.
        expert_parallel_size: consecutive HDP ranks E of a domain; 1: every rank has all experts.
        pipeline: that each rank is.

    Raises:
        ValueError: the ranks are no multiple of E, or the cost model has other ranks' speeds.
    """
    size, stages = expert_parallel_size, pipeline.stages
    lists, computed, of_members = _places(plan, size)
    # a rank takes as long with P stages as with one that has all layers
    whole = dataclasses.replace(cost_model, num_layers=cost_model.num_layers * stages)
    dense = evaluate(of_members, dataclasses.replace(whole, b_experts=0.0))
    speeds = speeds_of(cost_model, plan.num_ranks)
    experts_s = _experts_s(plan, lists, cost_model, speeds, size) * computed[::size].T
    with_padding = np.append(dense.duration_s, 0.0)
    member_s = np.where(
        lists == PADDING,
        computed * (fixed_s(np.ones(1), whole) / speeds)[:, None],
        with_padding[lists],
    )
    is_behind = lists == _BEHIND
    member_s[is_behind] = 0.0
    position_s = member_s.reshape(-1, size, lists.shape[1]).max(axis=1).T + experts_s
    domains = _Domains.of(plan, lists, position_s, size)
    schedule = replay(domains.plan, domains.duration_s, pipeline)
    of_micro_batch = domains.of_micro_batch
    owners = np.repeat(np.arange(plan.num_micro_batches), np.diff(plan.rank_offsets))
    places = domains.position[of_micro_batch[owners]]
    bound_s = target_s = lockstep_bound_s(plan.lengths, plan.num_ranks, cost_model, size)
    if stages > 1:
        target_s = pipeline_target_s(bound_s, plan.tokens_per_rank, cost_model, pipeline)
        bound_s = pipeline_bound_of(plan, cost_model, pipeline, size)
    values = {field.name: getattr(dense, field.name) for field in dataclasses.fields(Evaluation)}
    found = LockstepFigures(
        **values
        | {
            "busy_s": (dense.busy_s + experts_s.sum(axis=0).repeat(size)) / stages,
            "makespan_s": schedule.makespan_s,
            "total_compute_s": total_compute_s(plan.lengths, cost_model),
            "lower_bound_s": bound_s,
            "pipeline_bound_s": target_s,
            "pipeline": pipeline,
            "forward_start_s": schedule.forward_start_s[:, of_micro_batch],
            "backward_start_s": schedule.backward_start_s[:, of_micro_batch],
            "duration_s": domains.duration_s[of_micro_batch],
            "own_s": dense.own_s + experts_s[places, plan.ranks // size],
        },
        num_positions=lists.shape[1],
        padding_share=float((lists == PADDING).sum() / (~is_behind).sum()),
        position_s=position_s,
    )
    for value in vars(found).values():
        if isinstance(value, np.ndarray):
            value.setflags(write=False)
    return found


def evaluation_of(
    plan: Plan, cost_model: CostModel, expert_parallel_size: int, pipeline: Pipeline
) -> Evaluation:
    """The times of a plan, in lockstep where ranks share experts.

    The arguments are those of `figures_in_lockstep`.
    """
    if expert_parallel_size > 1:
        return figures_in_lockstep(plan, cost_model, expert_parallel_size, pipeline)
    return evaluate(plan, cost_model, pipeline.stages, pipeline.chunks, pipeline.weights)


_BEHIND = -2
"""Behind a list's end."""


def _places(plan: Plan, size: int) -> tuple[Int64Array, Float64Array, Plan]:
    """What each rank runs where, ``[ranks, positions]``: micro-batches, `PADDING` or `_BEHIND`; how
    often that is computed, in backward as often as in a step without streams; and the plan in which
    what runs beside streams is recomputed.
    """
    lists = slots(plan, aligned=True, lockstep_ranks=size)
    of_members, twice = beside_streams(plan, lists, lockstep_ranks=size)
    found = np.full((plan.num_ranks, max(map(len, lists))), _BEHIND, dtype=np.int64)
    computed = np.ones(found.shape)
    for rank, one in enumerate(lists):
        found[rank, : len(one)] = one
        computed[rank, : len(one)][twice[rank]] = _COMPUTED_TWICE
    return found, computed, of_members


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


class _Domains(NamedTuple):
    """What domains run: a micro-batch is a position of one, or of those that a ring ties there."""

    plan: Plan
    """Of domains in the place of ranks; each of its sequences stands for a position, and is as long
    as the longest stream there."""
    duration_s: Float64Array
    position: Int64Array
    of_micro_batch: Int64Array
    """The domains' micro-batch with each micro-batch of the ranks."""

    @classmethod
    def of(cls, plan: Plan, lists: Int64Array, position_s: Float64Array, size: int) -> Self:
        """Lay out what all positions take."""
        counts = (lists[::size] != _BEHIND).sum(axis=1)
        ties = _ties(plan, lists, size)
        found = np.full(position_s.shape, -1, dtype=np.int64)
        num = 0
        for place, row in enumerate(found):
            leader = np.arange(len(row))
            for group in _joined(ties.get(place, [])):
                leader[list(group)] = min(group)
            runs = counts > place
            numbers, row[runs] = np.unique(leader[runs], return_inverse=True)
            row[runs] += num
            num += len(numbers)
        places, domains = np.nonzero(found >= 0)
        numbers = found[places, domains]
        duration_s, parts = np.zeros(num), np.ones(num, dtype=np.int64)
        np.maximum.at(duration_s, numbers, position_s[places, domains])
        positions = np.zeros(num, dtype=np.int64)
        positions[numbers] = places
        of_micro_batch = np.zeros(plan.num_micro_batches, dtype=np.int64)
        ranks, at = np.nonzero(lists >= 0)
        of_micro_batch[lists[ranks, at]] = found[at, ranks // size]
        np.maximum.at(parts, of_micro_batch, plan.parts_of_each)
        lengths, streams = np.ones(num, dtype=np.int64), np.zeros(num, dtype=np.bool_)
        those = np.flatnonzero(plan.is_stream)
        longest = plan.lengths[plan.sequences[plan.sequence_offsets[those]]]
        np.maximum.at(lengths, of_micro_batch[those], longest)
        streams[of_micro_batch[those]] = True
        none = np.zeros(0, dtype=np.int64)
        of_domains = Plan(
            num_ranks=len(counts),
            tokens_per_rank=1,
            strategy="positions",
            lengths=lengths,
            rank_offsets=np.cumsum([0, *np.bincount(numbers, minlength=num)]),
            ranks=domains[np.argsort(numbers, kind="stable")].astype(np.int32),
            sequence_offsets=np.arange(num + 1),
            sequences=np.arange(num),
            local_offsets=np.zeros(num + 1, dtype=np.int64),
            local_sequences=none,
            local_ranks=none.astype(np.int32),
            offload_ratios=np.zeros(num),
            positions=positions,
            num_parts=None if plan.num_parts is None else parts,
            linear_tokens=plan.linear_tokens,
            streams=streams,
        )
        return cls(of_domains, duration_s, positions, of_micro_batch)


def _ties(plan: Plan, lists: Int64Array, size: int) -> dict[int, list[set[int]]]:
    """Domains that share a ring, by position."""
    found: dict[int, list[set[int]]] = {}
    starts, ends = plan.rank_offsets[:-1], plan.rank_offsets[1:]
    for m in np.flatnonzero(ends - starts > 1).tolist():
        members = plan.ranks[starts[m] : ends[m]]
        domains = set((members // size).tolist())
        if len(domains) > 1:
            place = int(np.flatnonzero(lists[members[0]] == m)[0])
            found.setdefault(place, []).append(domains)
    return found


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

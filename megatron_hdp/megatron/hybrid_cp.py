"""Megatron-Core's own hybrid context parallelism as a strategy: its assignment as one of our plans.

Its ``BalancedCPScheduler`` gives every sequence a power of two of ranks and puts the sequences into
groups; within a group a rank runs its sequences one after the other. So each sequence becomes a
micro-batch of its own. Megatron's runtime also has all ranks wait for each other after every group;
a plan has no such barrier, so its times here flatter Megatron's.
"""

import dataclasses
import time
import warnings
from typing import Any

import numpy as np

from megatron_hdp.arrays import Int64Array
from megatron_hdp.planner import CostModel, Plan, evaluate, slice_tokens

STRATEGY = "megatron-hybrid-cp"


class _Ranks:
    """What the scheduler asks of torch's process group: how many ranks it has."""

    def __init__(self, number: int) -> None:
        self._number = number

    def size(self) -> int:
        return self._number


def plan_hybrid_cp(
    lengths: Int64Array,
    *,
    ranks: int,
    tokens_per_rank: int,
    cost_model: CostModel,
    slice_multiple: int = 1,
) -> Plan:
    """Plans a global batch with megatron-core's scheduler; the plan may break the rule fit.

    Args:
        lengths: Tokens of each sequence.
        ranks: HDP ranks.
        tokens_per_rank: Capacity, Megatron's ``--max-seqlen-per-dp-cp-rank``.
        cost_model: For the summary; the scheduler balances the squares of the lengths.
        slice_multiple: Chunks are padded to a multiple of this.

    Raises:
        ValueError: megatron-core is missing or has no such scheduler, or the scheduler gives up.
    """
    scheduler_class = _scheduler_class()
    started = time.perf_counter()
    scheduler = scheduler_class(tokens_per_rank, _Ranks(ranks))
    numbered = list(enumerate(lengths.tolist()))
    try:
        _, groups = scheduler.get_groups_and_subsamples(numbered, None)
    except (AssertionError, IndexError) as error:
        raise ValueError(
            f"megatron-core's BalancedCPScheduler gave up on {len(lengths):,} sequences, the "
            f"longest of {lengths.max():,} tokens, and {ranks:,} ranks of {tokens_per_rank:,} "
            f"({type(error).__name__}: {error}): it wants a power of two of ranks "
            "that holds the longest sequence, and enough sequences for all of them"
        ) from error
    planning_ms = (time.perf_counter() - started) * 1e3
    rings = [ring for group in groups for ring in _rings_of(group)]
    made = _plan_of(rings, lengths, ranks, tokens_per_rank, slice_multiple)
    return _with_summary(made, cost_model, planning_ms)


def _scheduler_class() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no GPU does not matter for planning
            from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler
    except ImportError as error:
        raise ValueError(
            f"strategy {STRATEGY} runs megatron-core's BalancedCPScheduler, which does not import "
            f"({error}): pip install 'megatron-core>=0.16.1,<0.20'"
        ) from error
    return BalancedCPScheduler


def _rings_of(group: list[list[int]]) -> list[tuple[int, list[int]]]:
    """The (sequence, ranks) of a group, a valid launch order: ascending position on the ranks.

    Ranks that share a sequence share all sequences of the group, in one order.
    """
    members: dict[int, list[int]] = {}
    positions: dict[int, int] = {}
    for rank, sequences in enumerate(group):
        for position, sequence in enumerate(sequences):
            members.setdefault(sequence, []).append(rank)
            if positions.setdefault(sequence, position) != position:
                raise ValueError(
                    f"megatron-core's BalancedCPScheduler gives sequence {sequence} to ranks "
                    f"{members[sequence]} at different positions of their lists, which would hang"
                )
    return sorted(members.items(), key=lambda item: positions[item[0]])


def _plan_of(
    rings: list[tuple[int, list[int]]],
    lengths: Int64Array,
    ranks: int,
    tokens_per_rank: int,
    slice_multiple: int,
) -> Plan:
    number = len(rings)
    return Plan(
        num_ranks=ranks,
        tokens_per_rank=tokens_per_rank,
        strategy=STRATEGY,
        slice_multiple=slice_multiple,
        lengths=lengths,
        rank_offsets=np.cumsum([0, *(len(members) for _, members in rings)]),
        ranks=np.array([rank for _, members in rings for rank in members], dtype=np.int32),
        sequence_offsets=np.arange(number + 1),
        sequences=np.array([sequence for sequence, _ in rings], dtype=np.int64),
        local_offsets=np.zeros(number + 1, dtype=np.int64),
        local_sequences=np.zeros(0, dtype=np.int64),
        local_ranks=np.zeros(0, dtype=np.int32),
        offload_ratios=np.zeros(number),
    )


def _with_summary(made: Plan, cost_model: CostModel, planning_ms: float) -> Plan:
    evaluation = evaluate(made, cost_model)
    degrees = np.diff(made.rank_offsets)
    tokens = made.lengths[made.sequences]
    fullest = max(
        slice_tokens(length, degree, made.slice_multiple)
        for length, degree in zip(tokens.tolist(), degrees.tolist(), strict=True)
    )
    summary = {
        "makespan_s": evaluation.makespan_s,
        "lower_bound_s": evaluation.lower_bound_s,
        "efficiency": evaluation.efficiency,
        "planning_ms": planning_ms,
        "ring_tokens": float(((degrees - 1) * tokens).sum()),
        "max_tokens_on_a_rank": float(fullest),
    }
    return dataclasses.replace(made, summary=summary)

"""The ``plan`` function: checks what the user gives, calls the C++ planner, adds the figures."""

import difflib
import time
from collections.abc import Sequence
from typing import Any

from numpy.typing import ArrayLike

from megatron_hdp.planner.bounds import held_tokens, lockstep_bound_s, pipeline_lower_bound_s
from megatron_hdp.planner.cost_model import CostModel
from megatron_hdp.planner.extension import _core
from megatron_hdp.planner.problem import Problem
from megatron_hdp.planner.serialisation import LOCKSTEP_KEYS
from megatron_hdp.planner.types import Plan

STRATEGIES = (
    *("static", "naive", "bytescale", "dynamic-cp"),
    *("dp-balance", "pp-balance", "ep-balance", "auto"),
)


def plan(
    lengths: ArrayLike,
    *,
    ranks: int,
    tokens_per_rank: int,
    strategy: str = "auto",
    max_length: int | None = None,
    slice_multiple: int = 1,
    cost_model: CostModel | None = None,
    ranks_per_node: int | None = None,
    rank_speeds: Sequence[float] | None = None,
    pipeline_stages: int = 1,
    virtual_stages: int = 1,
    stage_weights: Sequence[float] | None = None,
    expert_parallel_size: int = 1,
    offload: str = "off",
    effort: int = 1,
) -> Plan:
    """Plans one global batch; a pure function of its arguments, ``summary["planning_ms"]`` apart.

    Args:
        lengths: Tokens of each sequence, at least 1 each.
        ranks: HDP ranks.
        tokens_per_rank: Capacity C: padded tokens that a rank can hold in one micro-batch.
        strategy: "static", "naive", "bytescale" (the paper's algorithm 2), "dynamic-cp"
            (Megatron-LM's dynamic context parallelism), "dp-balance", "pp-balance",
            "ep-balance" or "auto" (ep-balance if ranks share experts, pp-balance if there are
            several pipeline stages, else dp-balance).
        max_length: The context length, for which "static" chooses its fixed degree and which
            "dynamic-cp" refuses where no power of two of ranks holds it; the longest sequence if
            not given. No sequence may be longer.
        slice_multiple: Chunks are padded to a multiple of this.
        cost_model: LLaMA-7B at 400 TFLOP/s a rank if not given.
        ranks_per_node: Replaces the cost model's.
        rank_speeds: Speed of each rank; replaces the cost model's.
        pipeline_stages: Stages P of the pipeline that each HDP rank is.
        virtual_stages: Parts V of the model on each stage; above 1 the schedule is interleaved, and
            counts are padded to multiples of P.
        stage_weights: Relative time of each part in the model's order (part c P + s is chunk c of
            stage s), ``[P V]``; all alike if not given.
        expert_parallel_size: HDP ranks that share experts, which wait for each other at every
            position; ranks k x this to (k + 1) x this - 1 are such a domain. A divisor of the
            ranks. The figures are those of
            `planner.experts.figures_in_lockstep` then.
        offload: "auto" lets activations go to host memory where that saves ranks and no time.
        effort: Scales the iterations of local search; the planning time grows with it.

    Raises:
        ValueError: an argument is out of range or a sequence does not fit on all ranks.
    """
    started = time.perf_counter()
    problem = Problem.of(
        lengths,
        ranks=ranks,
        tokens_per_rank=tokens_per_rank,
        max_length=max_length,
        slice_multiple=slice_multiple,
        cost_model=cost_model,
        ranks_per_node=ranks_per_node,
        rank_speeds=rank_speeds,
        pipeline_stages=pipeline_stages,
        virtual_stages=virtual_stages,
        stage_weights=stage_weights,
        expert_parallel_size=expert_parallel_size,
        offload=offload,
        effort=effort,
    )
    resolved = _resolve(strategy, problem)
    answer = _core.plan(problem.core, resolved)
    planning_ms = (time.perf_counter() - started) * 1e3
    makespan_s = answer["makespan_s"]
    lower_bound_s = answer["lower_bound_s"]
    stages = problem.pipeline.stages
    shares_experts = problem.expert_parallel_size > 1
    given = problem.lengths, problem.num_ranks, problem.cost_model
    if stages > 1:
        offloads = bool(answer["offload_ratios"].any())
        held = held_tokens(
            problem.tokens_per_rank, problem.cost_model.num_layers, offloads=offloads
        )
        lower_bound_s = pipeline_lower_bound_s(
            *given, problem.pipeline, held, problem.expert_parallel_size
        )
    elif shares_experts:
        lower_bound_s = lockstep_bound_s(*given, problem.expert_parallel_size)
    return Plan(
        num_ranks=problem.num_ranks,
        tokens_per_rank=problem.tokens_per_rank,
        strategy=resolved,
        slice_multiple=problem.slice_multiple,
        lengths=problem.lengths,
        rank_offsets=answer["rank_offsets"],
        ranks=answer["ranks"],
        sequence_offsets=answer["sequence_offsets"],
        sequences=answer["sequences"],
        local_offsets=answer["local_offsets"],
        local_sequences=answer["local_sequences"],
        local_ranks=answer["local_ranks"],
        offload_ratios=answer["offload_ratios"],
        positions=answer["positions"],
        summary={
            "makespan_s": makespan_s,
            "lower_bound_s": lower_bound_s,
            "efficiency": answer["perfect_s"] / stages / makespan_s if makespan_s else 1.0,
            "planning_ms": planning_ms,
            "ring_tokens": answer["ring_tokens"],
            "max_tokens_on_a_rank": answer["max_tokens_on_a_rank"],
        }
        | (_lockstep_figures(answer) if shares_experts else {}),
    )


def _lockstep_figures(answer: Any) -> dict[str, float]:
    return {name: answer[name] for name in LOCKSTEP_KEYS}


def tight_bound_s(lengths: ArrayLike, **problem: Any) -> float:
    """Seconds that every plan takes at least; never below the plan's ``lower_bound_s``.

    It also counts what sequences cannot avoid to lose: traffic that is exposed at every degree at
    which they are short enough, and waiting for slow ranks that their memory makes them use. The
    proof stands in ``csrc/planner/bounds/bounds.hpp``. Pipeline stages are not taken into account.

    Args:
        lengths: Tokens of each sequence.
        problem: The arguments of ``plan`` but for the strategy.

    Raises:
        ValueError: as ``plan``.
    """
    return float(_core.tight_bound_s(Problem.of(lengths, **problem).core))


def _resolve(strategy: str, problem: Problem) -> str:
    if not isinstance(strategy, str):
        raise ValueError(f"strategy is {strategy!r}; expected one of {', '.join(STRATEGIES)}")
    if strategy == "auto":
        if problem.expert_parallel_size > 1:
            return "ep-balance"
        return "pp-balance" if problem.pipeline.stages > 1 else "dp-balance"
    if strategy in STRATEGIES:
        return strategy
    nearest = difflib.get_close_matches(strategy, STRATEGIES, n=1, cutoff=0.0)[0]
    raise ValueError(
        f"strategy is {strategy!r}; expected one of {', '.join(STRATEGIES)} (nearest: {nearest})"
    )

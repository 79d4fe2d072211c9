"""Plans a problem: calls the C++ planner and adds the figures."""

import time
from dataclasses import replace
from typing import Unpack

import numpy as np
from numpy.typing import ArrayLike

from megatron_hdp.nearest import nearest
from megatron_hdp.planner.bounds import lockstep_bound_s
from megatron_hdp.planner.extension import _core
from megatron_hdp.planner.pipeline_bounds import (
    most_held,
    most_recomputed,
    pipeline_bound_of,
    pipeline_lower_bound_s,
    with_least_traffic,
)
from megatron_hdp.planner.problem import Arguments, Problem
from megatron_hdp.planner.serialisation import LOCKSTEP_KEYS
from megatron_hdp.planner.types import Plan
from megatron_hdp.strategies import AUTO, CHOICES, resolved

STRATEGIES = (*CHOICES[1:], CHOICES[0])
"""What `plan` takes as its strategy."""


def plan(lengths: ArrayLike, *, strategy: str = AUTO, **arguments: Unpack[Arguments]) -> Plan:
    """Plans one global batch; a pure function of its arguments, ``summary["planning_ms"]`` apart.

    Args:
        lengths: Tokens of each sequence, at least 1 each.
        strategy: "static", "naive", "bytescale" (the paper's algorithm 2), "dynamic-cp"
            (Megatron-LM's dynamic context parallelism), "dp-balance", "pp-balance",
            "ep-balance" or "auto" (ep-balance if ranks share experts, pp-balance if there are
            several pipeline stages, else dp-balance).
        arguments: These, of which the first two are required:

            - ``ranks``: HDP ranks
            - ``tokens_per_rank``: capacity C: padded tokens that a rank can hold in one
              micro-batch
            - ``max_length``: the context length, for which "static" chooses its fixed degree and
              which "dynamic-cp" refuses where no power of two of ranks holds it; the longest
              sequence if not given; no sequence may be longer
            - ``slice_multiple``: chunks are padded to a multiple of this
            - ``cost_model``: LLaMA-7B at 400 TFLOP/s a rank if not given
            - ``ranks_per_node``: replaces the cost model's
            - ``rank_speeds``: speed of each rank; replaces the cost model's
            - ``pipeline_stages``: stages P of the pipeline that each HDP rank is
            - ``virtual_stages``: parts V of the model on each stage; above 1 the schedule is
              interleaved, and counts are padded to multiples of P
            - ``stage_weights``: relative time of each part in the model's order (part c P + s is
              chunk c of stage s), ``[P V]``; all are equal if not given
            - ``expert_parallel_size``: HDP ranks that share experts and wait for each other at
              every position; ranks k x this to (k + 1) x this - 1 are such a domain; a divisor of
              the ranks; the figures are those of `planner.experts.figures_in_lockstep` then
            - ``sequence_parts``: the most parts in which a micro-batch may run on several stages,
              or "auto": 8 for each stage; where ranks share experts, all of a domain's run in
              equally many at a position
            - ``offload``: "auto" lets activations go to host memory where that saves ranks and no
              time
            - ``host_memory_bytes``: that a micro-batch may fill of a rank's host memory; no limit
              if not given
            - ``streams``: lets sequences run as streams where no ring holds them, or where that is
              faster: in parts of equal tokens that keep only keys and values, on the host with
              ``offload="auto"`` where the device has no room, and are computed again in backward;
              "dp-balance" and "pp-balance", and "static" for what all ranks cannot hold
            - ``recompute``: "auto" lets sequences be recomputed in backward, layer by layer, where
              no ring holds them otherwise, or where a ring of fewer ranks is faster although it
              computes a third more; "dp-balance" and "pp-balance" only
            - ``effort``: scales the iterations of local search; the planning time grows with it

    Raises:
        ValueError: an argument is out of range or a sequence does not fit on all ranks.
    """
    return make_plan(Problem.of(lengths, **arguments), strategy)


def make_plan(problem: Problem, strategy: str = AUTO) -> Plan:
    """The same of a problem.

    Raises:
        ValueError: there is no such strategy, or a sequence does not fit on all ranks.
    """
    started = time.perf_counter()
    stages, shares_experts = problem.pipeline.stages, problem.expert_parallel_size > 1
    _require_known(strategy)
    strategy = resolved(strategy, stages=stages, shares_experts=shares_experts)
    answer = _core.plan(problem.core, strategy)
    made = Plan(
        num_ranks=problem.ranks,
        tokens_per_rank=problem.tokens_per_rank,
        strategy=strategy,
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
        num_parts=answer["num_parts"],
        linear_tokens=problem.linear_tokens,
    )
    if (stream_parts := answer["stream_parts"]) is not None:
        num_parts = np.where(stream_parts > 0, stream_parts, made.parts_of_each)
        made = replace(
            made,
            num_parts=num_parts,
            streams=stream_parts > 0,
            linear_tokens=problem.linear_tokens,
        )
    if (recomputed := answer["recomputed"]) is not None:
        share = problem.cost_model.recomputed_share
        made = replace(made, recomputed=recomputed > 0, recomputed_share=share)
    makespan_s, lower_bound_s = answer["makespan_s"], answer["lower_bound_s"]
    planning_ms = (time.perf_counter() - started) * 1e3
    cost_model, size = problem.cost_model, problem.expert_parallel_size
    if stages > 1:
        most_parts = problem.sequence_parts
        lower_bound_s = pipeline_bound_of(made, cost_model, problem.pipeline, size, most_parts)
    elif shares_experts:
        lower_bound_s = lockstep_bound_s(problem.lengths, problem.ranks, cost_model, size)
    summary = {
        "makespan_s": makespan_s,
        "lower_bound_s": lower_bound_s,
        "efficiency": answer["perfect_s"] / stages / makespan_s if makespan_s else 1.0,
        "planning_ms": planning_ms,
        "ring_tokens": answer["ring_tokens"],
        "max_tokens_on_a_rank": answer["max_tokens_on_a_rank"],
    }
    if shares_experts:
        summary |= {name: answer[name] for name in LOCKSTEP_KEYS}  # type: ignore[literal-required]
    return replace(made, summary=summary)


def tight_bound_s(lengths: ArrayLike, **arguments: Unpack[Arguments]) -> float:
    """Seconds that every plan takes at least; never below the plan's ``lower_bound_s``.

    It also counts what sequences cannot avoid to lose: traffic that is exposed at every degree at
    which they are short enough, and waiting for slow ranks that their memory makes them use. The
    proof stands in ``csrc/planner/bounds/bounds.hpp``. What holds for ranks of one stage holds for
    the share of it that each stage is: a stage of all ranks runs every micro-batch for its share of
    the micro-batch's time, whole or in parts. Shared experts are not taken into account there.
    The arguments are those of `plan`, and so are refusals.
    """
    return tight_bound_of(Problem.of(lengths, **arguments))


def tight_bound_of(problem: Problem) -> float:
    """The same of a problem."""
    pipeline, parts = problem.pipeline, problem.sequence_parts
    if pipeline.stages == 1:
        return float(_core.tight_bound_s(problem.core))
    cost_model, held = problem.cost_model, problem.tokens_per_rank
    if problem.offload == "auto":
        held = most_held(held, cost_model)
    if problem.recompute == "auto":
        held = max(held, most_recomputed(problem.tokens_per_rank, cost_model.recomputed_share))
    bound_s = pipeline_lower_bound_s(
        *(problem.lengths, problem.ranks, cost_model, pipeline),
        *(held, problem.expert_parallel_size, parts, problem.streams),
    )
    if problem.expert_parallel_size > 1:
        return bound_s
    least = with_least_traffic(cost_model) if parts > 1 else cost_model
    of_a_stage_s = float(_core.tight_bound_s(replace(problem, cost_model=least).core))
    return max(bound_s, float(pipeline.stage_weights.max()) * of_a_stage_s)


def _require_known(strategy: str) -> None:
    if isinstance(strategy, str) and strategy in STRATEGIES:
        return
    near = f" (nearest: {nearest(strategy, STRATEGIES)})" if isinstance(strategy, str) else ""
    raise ValueError(f"strategy is {strategy!r}; expected one of {', '.join(STRATEGIES)}{near}")

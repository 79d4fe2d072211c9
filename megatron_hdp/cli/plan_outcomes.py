"""One global batch planned by any strategy, and what came of it."""

import textwrap
from dataclasses import dataclass
from functools import cached_property
from typing import Unpack

from megatron_hdp.arrays import Int64Array
from megatron_hdp.planner import (
    Evaluation,
    Figures,
    Plan,
    PlanError,
    Problem,
    figures,
    make_plan,
    tight_bound_of,
    told_as,
)
from megatron_hdp.planner.experts import evaluation_of
from megatron_hdp.planner.problem import Arguments
from megatron_hdp.strategies import STRATEGIES

_OF_EXPERTS = [one.name for one in STRATEGIES if one.for_shared_experts]
COMPARED = tuple(one.name for one in STRATEGIES if not one.for_shared_experts)
"""Strategies in the order of a comparison; where ranks share experts, others follow."""

_MAX_REASON = 300  # characters
_FLAGS = {
    "tokens_per_rank": "--tokens-per-rank",
    "max_length": "--max-length",
    "virtual_stages": "--virtual-stages",
    "stage_weights": "--stage-weights",
    "sequence_parts": "--sequence-parts",
    "expert parallel size": "--expert-parallel-size",
    'offload="auto"': "--offload auto",
    "host_memory_bytes": "--host-memory-gb",
    'recompute="auto"': "--recompute auto",
    "streams=True with the strategy auto": "--streams",
}


@dataclass(frozen=True, eq=False, kw_only=True)
class Request(Problem):
    """What to plan, and how good its plans are."""

    @cached_property
    def tight_bound_s(self) -> float:
        """Proven for ranks that share no experts: no plan is faster, in as many parts as asked."""
        return tight_bound_of(self)

    def figures_of(self, made: Plan) -> Figures:
        """Replay a plan; in lockstep where ranks share experts."""
        if self.expert_parallel_size > 1:
            return self.evaluation_of(made)
        return figures(made, self.cost_model, *self._pipeline)

    def evaluation_of(self, made: Plan) -> Evaluation:
        """The same with the times of every micro-batch, to draw them."""
        return evaluation_of(made, self.cost_model, self.expert_parallel_size, self.pipeline)

    @property
    def _pipeline(self) -> tuple[int, int, tuple[float, ...]]:
        return self.pipeline.stages, self.pipeline.chunks, self.pipeline.weights


def request_of(lengths: Int64Array, **arguments: Unpack[Arguments]) -> Request:
    """The request of these arguments of `planner.plan`; errors name the command's flags."""
    with told_as(_FLAGS):
        return Request.of(lengths, **arguments)


@dataclass(frozen=True, eq=False)
class Outcome:
    """A strategy's plan with its times, or the reason why there is none."""

    strategy: str
    plan: Plan | None = None
    evaluation: Figures | None = None
    proven_bound_s: float = 0.0
    """No plan is faster; at least the evaluation's lower bound."""
    problem: str | None = None
    """Why there is no plan, or which rule it breaks."""


def plan_with(strategy: str, request: Request) -> Plan:
    """Plan by a strategy.

    Raises:
        ValueError: this strategy has no plan for the request.
    """
    with told_as(_FLAGS):
        return make_plan(request, strategy)


def evaluated(made: Plan, request: Request) -> Outcome:
    """Check a plan's rules and replay it.

    A plan that is only too large for the ranks' memory still has its times.

    Raises:
        ValueError: the plan breaks another rule, so that it cannot run.
    """
    problem = None
    stages = request.pipeline.stages
    try:
        made.validate(pipeline_stages=stages, num_layers=request.cost_model.num_layers)
    except PlanError as error:
        reason = textwrap.shorten(str(error), _MAX_REASON, placeholder=" ...")
        if error.rule != "fit":
            hint = f"with {stages} pipeline stages use pp-balance" if stages > 1 else "a defect"
            raise ValueError(f"{made.strategy} cannot run: {reason}: {hint}") from error
        problem = f"does not fit: {reason}"
    evaluation = request.figures_of(made)
    alone = request.expert_parallel_size == 1
    bound_s = request.tight_bound_s if alone else evaluation.lower_bound_s
    return Outcome(made.strategy, made, evaluation, bound_s, problem)


def outcome_of(strategy: str, request: Request) -> Outcome:
    """Plan, check and replay; a strategy that cannot gives its reason."""
    try:
        return evaluated(plan_with(strategy, request), request)
    except ValueError as error:
        return Outcome(strategy, problem=str(error))


def compare(request: Request, known: Outcome) -> list[Outcome]:
    """Return the outcome of every strategy; ``known`` is not planned again."""
    names = [*COMPARED, *(_OF_EXPERTS if request.expert_parallel_size > 1 else [])]
    return [known if name == known.strategy else outcome_of(name, request) for name in names]

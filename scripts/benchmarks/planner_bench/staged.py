"""Strategies on pipelines with and without virtual stages, with shared experts too.

What a strategy is told is what a run tells it (``planner.lockstep.planned_for``): one that knows
no positions plans as if there were one stage. What is judged is what a run executes: all V, and
where micro-batches do not stand at one position on all of their ranks, padding in between.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from planner_bench.cases import Case
from planner_bench.markdown import Measured
from planner_bench.measuring import planning_ms_of

from megatron_hdp.cli.plan_outcomes import Request, plan_with
from megatron_hdp.planner import Figures, Plan, PlanError, evaluate, tight_bound_of
from megatron_hdp.planner.experts import figures_in_lockstep
from megatron_hdp.planner.pipeline import Pipeline
from megatron_hdp.strategies import BY_NAME, resolved

OURS = "auto"
"""pp-balance, ep-balance with shared experts."""

IN_PARTS = "in parts"
"""What results of ours are named whose micro-batches may run in parts."""

ON_PLAIN_RINGS = "plain rings"
"""The same on rings that use the links of all their members of a node."""

_KEPT_PLANS = 256  # of one case for all V and seeds, so that the next one may have the same


@dataclass(frozen=True, kw_only=True)
class Staged(Measured):
    """With one V; figures are None where there is no plan."""

    virtual_stages: int
    makespan_s: float | None = None
    bound_s: float | None = None
    """Proven for the batch and this V (``pipeline_lower_bound_s``)."""
    target_s: float | None = None
    """Bound without stages / P + (P - 1) / (P V) x a full single-rank micro-batch."""
    perfect_s: float | None = None
    """Total compute / sum of speeds / P."""
    planning_ms: float | None = None
    """Median of several runs."""

    @property
    def of_the_bound(self) -> float | None:
        """Proven bound / makespan."""
        return self._share(self.bound_s)

    @property
    def of_the_greater(self) -> float | None:
        """The greater of target and proven bound / makespan."""
        return self._share(max(self.bound_s or 0.0, self.target_s or 0.0))

    @property
    def efficiency(self) -> float | None:
        """Total compute / sum of speeds / P / makespan."""
        return self._share(self.perfect_s)

    def _share(self, part_s: float | None) -> float | None:
        return None if part_s is None or not self.makespan_s else part_s / self.makespan_s


def measure_staged(
    case: Case,
    seed: int,
    strategies: Sequence[str],
    virtual_stages: Sequence[int],
    repeats: int,
    sequence_parts: int = 1,
) -> Iterator[Staged]:
    """Yield the result of each strategy with each V on one batch, and of ours in parts."""
    columns = [(name, name, case, chunks, 1) for name in strategies for chunks in virtual_stages]
    if sequence_parts > 1:
        costs = dataclasses.replace(case.cost_model, double_rings=True)
        double = dataclasses.replace(case, cost_model=costs)
        for chunks in virtual_stages:
            columns.append((IN_PARTS, OURS, double, chunks, sequence_parts))
            columns.append((ON_PLAIN_RINGS, OURS, case, chunks, sequence_parts))
    for name, strategy, one, chunks, parts in columns:
        planned = _planned(*told_of(one, strategy, chunks), parts, seed, repeats)
        result = Staged(
            case=case.name,
            seed=seed,
            strategy=name,
            virtual_stages=chunks,
            problem=planned.problem,
        )
        if planned.plan is not None:
            pipeline = Pipeline(case.pipeline_stages, chunks)
            whole = one.request(seed)
            request = dataclasses.replace(whole, pipeline=pipeline, sequence_parts=parts)
            figures = judged(planned.plan, request)
            result = dataclasses.replace(
                result,
                makespan_s=figures.makespan_s,
                bound_s=tight_bound_of(request) if parts > 1 else figures.lower_bound_s,
                target_s=figures.pipeline_bound_s,
                perfect_s=figures.efficiency * figures.makespan_s,
                planning_ms=planned.milliseconds,
            )
        yield result


def told_of(case: Case, strategy: str, chunks: int) -> tuple[Case, str, int]:
    """The case as a strategy is told of it, which strategy that is, and its virtual stages.

    Only ep-balance is told of shared experts.
    """
    stages, size = case.pipeline_stages, case.expert_parallel_size
    strategy = resolved(strategy, stages=stages, shares_experts=size > 1)
    known = BY_NAME.get(strategy)
    if not (known and known.on_pipelines):
        stages = chunks = 1
    size = size if strategy == "ep-balance" else 1
    told = dataclasses.replace(case, pipeline_stages=stages, expert_parallel_size=size)
    return told, strategy, chunks


def judged(made: Plan, request: Request) -> Figures:
    """The figures of what a run executes, by the evaluator that is written apart from the planner.

    ``request`` is the case itself, with V, whatever the plan was made for. Positions that the plan
    gives are kept; a plan that has none and whose lists do not agree is aligned.
    """
    pipeline = request.pipeline
    cost_model, size = request.cost_model, request.expert_parallel_size
    if size > 1 or (pipeline.chunks == 1 and not _runs_as_listed(made, pipeline.stages)):
        return figures_in_lockstep(made, cost_model, size, pipeline)
    return evaluate(made, cost_model, pipeline_stages=pipeline.stages, model_chunks=pipeline.chunks)


def _runs_as_listed(made: Plan, stages: int) -> bool:
    """Whether no list needs padding."""
    if made.positions is not None:
        return False
    try:
        made.validate(pipeline_stages=stages)
    except PlanError as error:
        return error.rule != "order"
    return True


@dataclass(frozen=True, eq=False)
class _Planned:
    plan: Plan | None = None
    milliseconds: float | None = None
    problem: str | None = None


@lru_cache(_KEPT_PLANS)
def _planned(
    told: Case, strategy: str, chunks: int, parts: int, seed: int, repeats: int
) -> _Planned:
    pipeline = Pipeline(told.pipeline_stages, chunks)
    request = dataclasses.replace(told.request(seed), pipeline=pipeline, sequence_parts=parts)
    try:
        made = plan_with(strategy, request)
    except ValueError as error:
        return _Planned(problem=str(error))
    problem = None
    try:
        made.validate(num_layers=request.cost_model.num_layers)
    except PlanError as error:
        if error.rule != "fit":
            raise
        problem = f"does not fit: {error}"
    return _Planned(made, planning_ms_of(strategy, request, made, repeats), problem)

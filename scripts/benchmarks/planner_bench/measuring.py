"""Strategies on the same batches: their plans' times, bounds, traffic and loss to noise."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np
from planner_bench.cases import Case
from planner_bench.markdown import Measured

from megatron_hdp.cli.plan_outcomes import Outcome, Request, outcome_of, plan_with
from megatron_hdp.cli.plan_text import share
from megatron_hdp.planner import Plan, evaluate, replay

NOISY_STEPS = 3
"""For each batch and strength."""

_SLOW_PLANNING_MS = 500.0  # measured once


@dataclass(frozen=True, kw_only=True)
class Result(Measured):
    """Figures are None where there is no plan."""

    num_sequences: int
    efficiency: float | None = None
    """Total compute / sum of speeds / makespan."""
    bound_share: float | None = None
    """Bound / makespan."""
    proven_share: float | None = None
    """The tightest bound that is proven / makespan."""
    makespan_s: float | None = None
    lower_bound_s: float | None = None
    ring_bytes: float | None = None
    planning_ms: float | None = None
    """Median of several runs."""
    lost_to_noise: dict[float, float] = dataclasses.field(default_factory=dict)
    """By the strength of the noise in %: the makespan with noise / the one without - 1, a mean."""


def measure(
    case: Case,
    seed: int,
    strategies: Sequence[str],
    repeats: int,
    noise: Sequence[float] = (),
) -> Iterator[Result]:
    """Yield the result of each strategy on one batch."""
    request = case.request(seed)
    for strategy in strategies:
        outcome = outcome_of(strategy, request)
        result = Result(
            case=case.name,
            seed=seed,
            strategy=strategy,
            problem=outcome.problem,
            num_sequences=len(request.lengths),
        )
        figures = _figures_of(strategy, request, outcome, repeats)
        if outcome.plan is not None and outcome.evaluation is not None:
            lost = {strength: _lost_to_noise(outcome.plan, request, strength) for strength in noise}
            figures["lost_to_noise"] = lost
        yield dataclasses.replace(result, **figures)


def _lost_to_noise(made: Plan, request: Request, strength: float) -> float:
    """What steps take longer whose members each take lognormal times of mean 1, in parts of 1."""
    quiet = evaluate(made, request.cost_model)
    deviation = strength / 100
    makespans = []
    for step in range(NOISY_STEPS):
        rng = np.random.default_rng(step)
        factors = rng.lognormal(-(deviation**2) / 2, deviation, len(made.ranks))
        duration_s = np.maximum.reduceat(quiet.own_s * factors, made.rank_offsets[:-1])
        makespans.append(replay(made, duration_s).makespan_s)
    return fmean(makespans) / quiet.makespan_s - 1


def _figures_of(strategy: str, request: Request, outcome: Outcome, repeats: int) -> dict[str, Any]:
    made, evaluation = outcome.plan, outcome.evaluation
    if made is None or evaluation is None:
        return {}
    return {
        "efficiency": evaluation.efficiency,
        "bound_share": share(evaluation.lower_bound_s, evaluation),
        "proven_share": share(outcome.proven_bound_s, evaluation),
        "makespan_s": evaluation.makespan_s,
        "lower_bound_s": evaluation.lower_bound_s,
        "ring_bytes": evaluation.ring_bytes,
        "planning_ms": planning_ms_of(strategy, request, made, repeats),
    }


def planning_ms_of(strategy: str, request: Request, made: Plan, repeats: int) -> float:
    """Median of several plannings, the one of ``made`` being the first."""
    planning_ms = [made.summary["planning_ms"]]
    while len(planning_ms) < repeats and planning_ms[0] < _SLOW_PLANNING_MS:
        planning_ms.append(plan_with(strategy, request).summary["planning_ms"])
    return median(planning_ms)

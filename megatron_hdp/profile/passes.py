"""Repeats all cases, in another order each time, until the budget is spent."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from megatron_hdp.profile.cases import Case
from megatron_hdp.profile.fitting import Fit, Measured, Shape, fit, noise_in

FEWEST = 3
"""Passes that are always made."""
MOST_MEASUREMENTS = 3
"""Times that the budget is spent while the fit is too noisy to use."""
_MOST = 200
_WARM_UP_SHARE = 1 / (FEWEST + 1)
_ALWAYS_SHARE = 1 / 4

Progress: TypeAlias = Callable[[str, float], None]
"""Is told what is done now and the share of the budget that is gone."""


class TimesCases(Protocol):
    """What runs a case; all ranks get the same answers."""

    elapsed_s: float

    def seconds(self, case: Case) -> float:
        """What the case took, in seconds."""


@dataclass(frozen=True)
class Fitted:
    """A fit that can be used, and what it was made from."""

    fit: Fit
    measured: tuple[Measured, ...]
    left_out: tuple[Case, ...]
    """Cases that the budget had no room for."""
    measurements: int
    """How often the budget was spent."""
    doubt: str
    """Why the times are too noisy to use, where they are used by force; else empty."""


def fitted(
    bench: TimesCases,
    cases: Sequence[Case],
    shape: Shape,
    budget_s: float,
    progress: Progress = lambda what, done: None,
    on_any_rank: Callable[[bool], bool] = lambda found: found,
    force: bool = False,
) -> Fitted:
    """Measures and fits; measures again, a few times, while the times are too noisy to use.

    Every measurement adds its repetitions to those before it.

    Args:
        bench: times one case.
        cases: the same on every rank, in the same order.
        shape: of the run.
        budget_s: seconds of one measurement.
        progress: see `Progress`.
        on_any_rank: whether something holds on any rank of the job, so that all do the same.
        force: return a fit that is too noisy to use, with its doubt.

    Raises:
        ValueError: the times are too noisy to use, or there are too few cases.
    """
    seconds: dict[Case, tuple[float, ...]] = {}
    for number in range(1, MOST_MEASUREMENTS + 1):
        for one in measure(bench, cases, budget_s, progress)[0]:
            seconds[one.case] = seconds.get(one.case, ()) + one.seconds
        measured = tuple(Measured(case, seconds[case]) for case in cases if case in seconds)
        found = fit(measured, shape)
        noise = noise_in(found, measured)
        is_noisy = on_any_rank(noise is not None)
        if not is_noisy or (force and number == MOST_MEASUREMENTS):
            left_out = tuple(case for case in cases if case not in seconds)
            return Fitted(found, measured, left_out, number, _doubt(noise) if is_noisy else "")
    raise ValueError(
        f"{_doubt(noise)} (measured {number} times): profile again while nothing else uses the "
        "machine, raise --budget-seconds or --hdp-tokens-per-rank, or add --force to write it"
    )


def _doubt(noise: str | None) -> str:
    return noise or "another rank cannot use the times"


def measure(
    bench: TimesCases,
    cases: Sequence[Case],
    budget_s: float,
    progress: Progress = lambda what, done: None,
) -> tuple[list[Measured], tuple[Case, ...]]:
    """Times the cases; returns what was found, and the cases that the budget had no room for.

    The first pass warms up and counts for nothing; short cases come first in it, and once a quarter
    of the budget is gone those with more than a quarter of the tokens are left out. Later passes
    take the cases in another order each, so that a machine that slows down does so for all of them.
    Three passes are made at least. The arguments are those of `fitted`.
    """
    start_s = bench.elapsed_s
    kept: list[Case] = []
    always = _ALWAYS_SHARE * max(map(_tokens_of_rank, cases))
    for case in sorted(cases, key=lambda one: (_tokens_of_rank(one), one.num_tokens)):
        if _tokens_of_rank(case) > always and bench.elapsed_s - start_s > _WARM_UP_SHARE * budget_s:
            break
        bench.seconds(case)
        kept.append(case)
        progress(f"warm-up {len(kept)} of {len(cases)}", (bench.elapsed_s - start_s) / budget_s)
    seconds: dict[Case, list[float]] = {case: [] for case in kept}
    rng = np.random.default_rng(0)
    longest_s = 0.0
    for number in range(_MOST):
        if number >= FEWEST and bench.elapsed_s - start_s + longest_s > budget_s:
            break
        began_s = bench.elapsed_s
        for which in rng.permutation(len(kept)):
            seconds[kept[which]].append(bench.seconds(kept[which]))
            progress(f"pass {number + 1}", (bench.elapsed_s - start_s) / budget_s)
        longest_s = max(longest_s, bench.elapsed_s - began_s)
    left_out = tuple(case for case in cases if case not in seconds)
    return [Measured(case, tuple(seconds[case])) for case in cases if case in seconds], left_out


def _tokens_of_rank(case: Case) -> float:
    return case.num_tokens / case.degree

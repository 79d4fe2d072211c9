"""Repeats all cases, in another order each time, until the budget is spent."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from megatron_hdp.profile.cases import COMPUTE, Case
from megatron_hdp.profile.fitting import Measured

FEWEST = 3
"""Passes that are made whatever they take."""
_MOST = 200
_WARM_UP_SHARE = 1 / (FEWEST + 1)
_ALWAYS_SHARE = 1 / 4


class TimesCases(Protocol):
    """What runs a case; all ranks get the same answers."""

    elapsed_s: float

    def seconds(self, case: Case) -> float:
        """What the case took, in seconds."""


def measure(
    bench: TimesCases,
    cases: Sequence[Case],
    budget_s: float,
    progress: Callable[[str, float], None] = lambda what, done: None,
) -> tuple[list[Measured], tuple[Case, ...]]:
    """Times the cases; returns what was found, and the cases that the budget had no room for.

    The first pass warms up and counts for nothing; short cases come first in it, and once a quarter
    of the budget is gone those with more than a quarter of the tokens are left out. Later passes
    take the cases in another order each, so that a machine that slows down does so for all alike.

    Args:
        bench: times one case.
        cases: the same on every rank, in the same order.
        budget_s: seconds for all; three passes are made at least.
        progress: is told what is done now and the share of the budget that is gone.
    """
    kept: list[Case] = []
    always = _ALWAYS_SHARE * max(map(_tokens_of_rank, cases))
    for case in sorted(cases, key=lambda one: (_tokens_of_rank(one), one.num_tokens)):
        if _tokens_of_rank(case) > always and bench.elapsed_s > _WARM_UP_SHARE * budget_s:
            break
        bench.seconds(case)
        kept.append(case)
        progress(f"warm-up {len(kept)} of {len(cases)}", bench.elapsed_s / budget_s)
    seconds: dict[Case, list[float]] = {case: [] for case in kept}
    rng = np.random.default_rng(0)
    longest_s = 0.0
    for number in range(_MOST):
        if number >= FEWEST and bench.elapsed_s + longest_s > budget_s:
            break
        began_s = bench.elapsed_s
        for place in rng.permutation(len(kept)):
            seconds[kept[place]].append(bench.seconds(kept[place]))
            progress(f"pass {number + 1}", bench.elapsed_s / budget_s)
        longest_s = max(longest_s, bench.elapsed_s - began_s)
    left_out = tuple(case for case in cases if case not in seconds)
    return [Measured(case, tuple(seconds[case])) for case in cases if case in seconds], left_out


def _tokens_of_rank(case: Case) -> float:
    return case.num_tokens / case.degree


def lengths_of(measured: Sequence[Measured]) -> tuple[int, int]:
    """The shortest and the longest sequence that was run whole on a rank."""
    lengths = [
        length for one in measured if one.case.kind == COMPUTE for length in one.case.lengths
    ]
    return min(lengths), max(lengths)

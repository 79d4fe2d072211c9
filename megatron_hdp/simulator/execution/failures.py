"""What failures cost a run: restarts from checkpoints, or resuming in place with the ranks left.

Failures come at random, with no memory (a Poisson process); each interrupts work that is done in
units of ``u`` seconds, is followed by a recovery of ``R`` seconds and costs what the unit had
done. A recovery that is interrupted begins anew. A unit then takes on average

    E = M exp(R / M) (exp(u / M) - 1)

seconds, with ``M`` the mean time between failures: the number of failures before the unit goes
through is geometric with mean ``exp(u / M) - 1``; each costs the mean time to it and the mean time
that a recovery takes to go through, which the same argument gives. That is the model of J. T. Daly,
"A higher order estimate of the optimum checkpoint interval for restart dumps" (Future
Generation Computer Systems 22, 2006) without the time to write a checkpoint, which is written
beside the steps here.

With restarts a unit is the work between two checkpoints. In place it is a step, the recovery is
what the survivors take to meet again, and, with the distributed optimizer, the time in which the
copies of the version before are on their way: a failure in it costs one step more, so that time on
average. Until the host is replaced the others do its work: as many hosts are missing on average as
fail while one is replaced (Little's law).
"""

import math
from dataclasses import dataclass

FAILURE_KEYS = {
    "strategy": "The fastest one, whose steps are counted.",
    "mtbf_s": "Mean time between failures of the job.",
    "checkpoint_s": "Time between checkpoints.",
    "restart_s": "From a failure to the first step after a restart.",
    "restart_share": "Share of the time that is not lost, with restarts.",
    "regroup_s": "From a failure to the step that survivors do again.",
    "copies_s": "In which the copies of a version are on their way to the neighbours.",
    "copies_host_bytes": "Host memory of a GPU's copies: two versions, own and a neighbour's.",
    "replace_s": "Until a failed host is replaced.",
    "short_step_s": "Step time without one host; null: its ranks are needed, the others wait for "
    "the replacement.",
    "missing_share": "Of the time that is lost in place, what a missing host costs.",
    "in_place_share": "Share of the time that is not lost, in place.",
    "gain": "Steps in place over steps with restarts, in the same time.",
}
"""What `Forecast.figures` gives, by name."""

_MOST_EXPONENT = 700.0  # beyond it no unit ever goes through


def useful_share(mtbf_s: float, unit_s: float, recovery_s: float) -> float:
    """Share of the time that goes into work that lasts; see the module's formula.

    Args:
        mtbf_s: mean time between failures.
        unit_s: work that is done again if it is interrupted; 0: none is.
        recovery_s: after each failure.
    """
    unit, recovery = unit_s / mtbf_s, recovery_s / mtbf_s
    if unit + recovery > _MOST_EXPONENT:
        return 0.0
    return math.exp(-recovery) * (unit / math.expm1(unit) if unit else 1.0)


@dataclass(frozen=True, kw_only=True)
class Failures:
    """How often a job fails and what follows, in seconds."""

    mtbf_s: float
    restart_s: float
    checkpoint_s: float
    regroup_s: float
    replace_s: float


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What a run of one strategy loses."""

    failures: Failures
    strategy: str
    step_s: float
    short_step_s: float | None
    """Without one host; None: there is no plan."""
    copies_s: float
    copies_host_bytes: float

    @property
    def restart_share(self) -> float:
        """Of the time, with restarts from checkpoints."""
        one = self.failures
        return useful_share(one.mtbf_s, max(one.checkpoint_s, self.step_s), one.restart_s)

    @property
    def missing_share(self) -> float:
        """Of the time in place, what missing hosts cost."""
        if self.short_step_s is None:
            return 0.0
        missing = self.failures.replace_s / self.failures.mtbf_s
        return min(1.0, missing * max(0.0, 1 - self.step_s / self.short_step_s))

    @property
    def in_place_share(self) -> float:
        """Of the time, where survivors resume."""
        one = self.failures
        recovery_s = one.regroup_s + min(self.copies_s, self.step_s)
        if self.short_step_s is None:
            recovery_s += one.replace_s
        return useful_share(one.mtbf_s, self.step_s, recovery_s) * (1 - self.missing_share)

    def figures(self) -> dict[str, object]:
        """By the names of report.json."""
        gain = self.in_place_share / self.restart_share if self.restart_share else None
        values = vars(self.failures) | vars(self) | {"gain": gain}
        return {key: values[key] if key in values else getattr(self, key) for key in FAILURE_KEYS}

"""What failures cost, against runs that fail at random."""

import math
import random

import pytest

from megatron_hdp.simulator.execution import Failures, Forecast, useful_share

FAILURES = 4000


def run_at_random(mtbf_s, unit_s, recovery_s, *, window_s=0.0, slower=0.0, replace_s=0.0, seed=0):
    """Share of the time that lasting work takes in a run of `FAILURES` failures.

    Args:
        mtbf_s, unit_s, recovery_s: as of `useful_share`.
        window_s: after each unit, in which a failure costs the unit before, too.
        slower: speed that each missing host costs.
        replace_s: for which it is missing, on average.
        seed: of the failures.
    """
    draw = random.Random(seed)
    now = work = 0.0
    back: list[float] = []  # when missing hosts are there again
    for _ in range(FAILURES):
        up_s = draw.expovariate(1 / mtbf_s)
        while up_s < recovery_s:  # interrupted, begins anew
            now += up_s
            up_s = draw.expovariate(1 / mtbf_s)
        end, now = now + up_s, now + recovery_s
        done = 0.0
        while now < end:
            back = [one for one in back if one > now]
            until = min([end, *back])
            done += (until - now) * (1 - slower * len(back))
            now = until
        units, rest = divmod(done, unit_s)
        if units and rest < window_s:
            units -= 1
        work += units * unit_s
        if replace_s:
            back.append(now + draw.expovariate(1 / replace_s))
    return work / now


@pytest.mark.parametrize(
    ("mtbf_s", "unit_s", "recovery_s"),
    [(28_440, 1800, 300), (6480, 1800, 300), (600, 1800, 300), (6480, 9, 60)],
)
def test_the_formula_is_what_random_failures_give(mtbf_s, unit_s, recovery_s):
    lost = 1 - useful_share(mtbf_s, unit_s, recovery_s)
    assert 1 - run_at_random(mtbf_s, unit_s, recovery_s) == pytest.approx(lost, rel=0.05)


def forecast(mtbf_s, **changes):
    one = Failures(
        mtbf_s=mtbf_s, restart_s=300.0, checkpoint_s=1800.0, regroup_s=20.0, replace_s=3600.0
    )
    fields = {"strategy": "auto", "step_s": 30.0, "short_step_s": 31.0, "copies_s": 6.0}
    return Forecast(failures=one, copies_host_bytes=1e9, **(fields | changes))


def test_in_place_a_step_the_window_of_copies_and_missing_hosts_are_lost():
    made = forecast(6480.0)
    found = run_at_random(
        6480.0, 30.0, 20.0, window_s=6.0, slower=1 - 30 / 31, replace_s=3600.0, seed=1
    )
    assert 1 - found == pytest.approx(1 - made.in_place_share, rel=0.1)
    lost = [1 - forecast(6480.0, copies_s=0.0).in_place_share, 1 - made.in_place_share]
    assert lost[1] - lost[0] == pytest.approx(6 / 6480, rel=0.05)  # and the formula has all parts
    whole = forecast(6480.0, short_step_s=30.0)
    assert whole.missing_share == 0 and made.missing_share == pytest.approx(3600 / 6480 / 31)


def test_the_arithmetic_of_published_failure_rates():
    """MTTF of 1,024 and 16,384 GPUs (arXiv 2410.21680), 5 min and half an hour's checkpoints."""
    for hours, lost in ((7.9, 0.042), (1.8, 0.185)):
        first_order = (300 + 1800 / 2) / (3600 * hours)
        assert first_order == pytest.approx(lost, abs=0.001)
        made = forecast(3600 * hours)
        assert 1 - made.restart_share == pytest.approx(first_order, rel=0.1)
        assert made.figures()["gain"] == made.in_place_share / made.restart_share > 1 + lost / 2


def test_too_few_ranks_wait_and_rare_failures_cost_nothing():
    waits = forecast(6480.0, short_step_s=None)
    assert waits.missing_share == 0
    assert waits.in_place_share < forecast(6480.0).in_place_share < 1
    assert waits.in_place_share == useful_share(6480.0, 30.0, 20.0 + 6.0 + 3600.0)
    rare = forecast(1e15)
    assert rare.restart_share == pytest.approx(1) and rare.figures()["gain"] == pytest.approx(1)
    hopeless = forecast(1.0)
    assert hopeless.restart_share == 0 and hopeless.figures()["gain"] is None
    assert useful_share(100.0, 0.0, 10.0) == math.exp(-0.1)

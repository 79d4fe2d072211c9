"""Measuring keeps to its budget and mixes the cases."""

import numpy as np
import pytest

from megatron_hdp.profile.cases import Room, cases_of
from megatron_hdp.profile.passes import FEWEST, MOST_MEASUREMENTS, fitted, measure
from megatron_hdp.profile.report import lengths_of
from tests.profile.test_fitting import PLANTED, SHAPE, Fit

CASES = cases_of(Room(2048, 8192, ranks=2, ranks_per_node=2))


class Bench:
    """Takes a microsecond a token, and notes the order."""

    def __init__(self, s_per_token=1e-6):
        self.elapsed_s, self.ran, self._s_per_token = 0.0, [], s_per_token

    def seconds(self, case):
        self.ran.append(case)
        taken_s = max(case.num_tokens, 1) * self._s_per_token
        self.elapsed_s += taken_s
        return taken_s


class PlantedBench:
    """Takes what a machine with known coefficients takes, but for noise in its first seconds."""

    def __init__(self, noise, noisy_s):
        self.elapsed_s, self._noise, self._noisy_s = 0.0, noise, noisy_s
        self._machine, self._rng = Fit(PLANTED, SHAPE), np.random.default_rng(0)

    def seconds(self, case):
        noise = self._noise if self.elapsed_s < self._noisy_s else 0.01
        taken_s = self._machine.predicted_s(case) * self._rng.lognormal(0, noise)
        self.elapsed_s += self._machine.predicted_s(case)
        return taken_s


def test_times_without_noise_are_measured_once():
    found = fitted(PlantedBench(0.01, 0.0), CASES, SHAPE, 20.0)
    assert found.measurements == 1
    of_tokens = PLANTED["b"] + PLANTED["b_experts"]  # no cases of experts alone
    assert found.fit.values["b"] == pytest.approx(of_tokens, rel=0.1)


def test_noisy_times_are_measured_again():
    """The machine was busy during the first measurement only."""
    bench = PlantedBench(2.0, 10.0)
    told = []
    found = fitted(bench, CASES, SHAPE, 10.0, lambda what, share: told.append(share))
    assert 1 < found.measurements <= MOST_MEASUREMENTS
    assert found.fit.values["b"] > 0 and max(told) <= 1.5
    repetitions = {len(one.seconds) for one in found.measured}
    assert min(repetitions) >= FEWEST * found.measurements


def test_times_that_stay_noisy_are_refused():
    bench = PlantedBench(2.0, np.inf)
    with pytest.raises(ValueError, match=r"too noisy .*measured 3 times"):
        fitted(bench, CASES, SHAPE, 1.0)


def test_all_ranks_stop_where_one_finds_noise():
    with pytest.raises(ValueError, match="another rank"):
        fitted(PlantedBench(0.01, 0.0), CASES, SHAPE, 1.0, on_any_rank=lambda found: True)


def test_the_budget_is_used_and_kept():
    bench = Bench()
    told = []
    measured, left_out = measure(bench, CASES, 1.0, lambda *what: told.append(what))
    a_pass_s = sum(one.num_tokens for one in CASES) * 1e-6
    assert 1.0 - 1.1 * a_pass_s < bench.elapsed_s <= 1.0
    assert left_out == ()
    assert [one.case for one in measured] == list(CASES)
    passes = {len(one.seconds) for one in measured}
    assert len(passes) == 1 and passes.pop() > FEWEST
    assert told[0][0].startswith("warm-up 1 of") and told[-1][1] <= 1.0
    assert lengths_of(measured) == (64, 2048)


def test_every_pass_has_another_order_the_same_on_all_ranks():
    bench, other = Bench(), Bench()
    for one in (bench, other):
        measure(one, CASES, 1.0)
    assert bench.ran == other.ran
    orders = [
        tuple(bench.ran[first : first + len(CASES)])
        for first in range(0, len(bench.ran), len(CASES))
    ]
    assert all(set(order) == set(CASES) for order in orders)
    assert len(set(orders)) == len(orders) > FEWEST


@pytest.mark.parametrize("budget_s", [0.02, 0.05])
def test_long_cases_are_left_out_where_the_budget_is_small(budget_s):
    bench = Bench()
    measured, left_out = measure(bench, CASES, budget_s)
    assert {len(one.seconds) for one in measured} == {FEWEST}
    assert left_out and len(measured) + len(left_out) == len(CASES)

    def tokens(case):
        return case.num_tokens / case.degree

    assert max(tokens(one.case) for one in measured) <= min(map(tokens, left_out))
    assert bench.elapsed_s < 1.0 * budget_s + (FEWEST + 1) * 2048 * 2e-6

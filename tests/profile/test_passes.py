"""Cases fit into what a job has room for; measuring keeps to its budget and mixes them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hdp.profile.cases import ATTENTION, COMPUTE, RING, TRANSFER, Case, Room, cases_of
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
    assert found.measurements == 1 and not found.doubt
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
    with pytest.raises(ValueError, match=r"too noisy .*measured 3 times.*--force"):
        fitted(bench, CASES, SHAPE, 1.0)
    forced = fitted(PlantedBench(2.0, np.inf), CASES, SHAPE, 1.0, force=True)
    assert "too noisy" in forced.doubt and forced.measurements == MOST_MEASUREMENTS


def test_all_ranks_stop_where_one_finds_noise():
    planted = PlantedBench(0.01, 0.0), CASES, SHAPE, 1.0
    with pytest.raises(ValueError, match="another rank"):
        fitted(*planted, on_any_rank=lambda found: True)
    assert "another rank" in fitted(*planted, on_any_rank=lambda found: True, force=True).doubt


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


ROOMS = st.builds(
    Room,
    tokens_per_rank=st.integers(32, 100_000),
    longest=st.integers(32, 1_000_000),
    ranks=st.integers(1, 20),
    ranks_per_node=st.integers(1, 8),
    multiple=st.integers(1, 8),
    kv_bytes_per_layer=st.integers(1, 10_000),
)


@given(ROOMS)
def test_they_fit(room):
    for case in cases_of(room):
        assert 1 <= case.degree <= room.ranks
        assert case.leaves_node == (case.degree > room.ranks_per_node)
        if case.kind == TRANSFER:
            assert 0 < case.num_bytes <= 4 * room.tokens_per_rank * room.kv_bytes_per_layer
            continue
        assert min(case.lengths) >= 2 and max(case.lengths) <= room.longest
        assert case.num_tokens <= room.tokens_per_rank * case.degree
        of_chunk = 2 * case.degree if case.degree > 1 else 1
        assert all(length % (of_chunk * room.multiple) == 0 for length in case.lengths)
        assert (case.degree > 1) == (case.kind == RING)


@given(ROOMS)
def test_each_is_run_once_and_is_fitted_or_held_out(room):
    cases = cases_of(room)
    assert len({(one.kind, one.lengths, one.degree, one.num_bytes) for one in cases}) == len(cases)
    assert all(one.kind in (COMPUTE, RING) for one in cases if one.is_held_out)
    degrees = {one.degree for one in cases if one.kind == RING and not one.is_held_out}
    assert room.ranks == 1 or (room.ranks in degrees) or room.longest < 100 * room.ranks


def test_held_out_are_lengths_and_degrees_between():
    cases = cases_of(Room(2048, 8192, ranks=8, ranks_per_node=4))
    rings = [one for one in cases if one.kind == RING]
    fitted = {one.degree for one in rings if not one.is_held_out}
    assert fitted == {2, 4, 8}
    assert {one.degree for one in rings} - fitted == {3, 6}
    assert {one.degree for one in cases if one.kind == TRANSFER} == {4, 8}
    whole = {one.lengths for one in cases if one.kind == COMPUTE and one.is_held_out}
    assert whole == {(1433,), (716,), (368,), (256,) * 8}
    assert not whole & {one.lengths for one in cases if one.kind == ATTENTION}


def test_a_case_says_what_it_is():
    assert str(Case(COMPUTE, (1024,) * 2)) == "compute 2 x 1,024 tokens"
    assert str(Case(RING, (4096,), 3)) == "ring 4,096 tokens, 3 ranks"
    assert str(Case(TRANSFER, degree=2, num_bytes=4096)) == "transfer of 4,096 B, 2 ranks"

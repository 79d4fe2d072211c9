"""The fit gives back what was planted, in the planner's own words."""

import dataclasses
from functools import partial

import numpy as np
import pytest

from megatron_hdp.planner import CostModel
from megatron_hdp.planner.bounds import own_times_s
from megatron_hdp.profile.cases import ATTENTION, COMPUTE, RING, Case, Room, cases_of
from megatron_hdp.profile.fitting import (
    NAMES,
    Fit,
    Measured,
    Shape,
    coefficients_of,
    errors_of,
    fit,
    noise_in,
    nonnegative,
    warnings_of,
    wires_of,
)

COUNTED = CostModel(a=0.0, b=0.0, kv_bytes_per_token=4096.0)
SHAPE = Shape(layers=4, counted=COUNTED)
ROOM = Room(2048, 8192, ranks=4, ranks_per_node=2, kv_bytes_per_layer=1024, has_experts=True)
PLANTED = {
    "a": 1e-8,
    "attention_b": 2e-6,
    "b": 2e-5,
    "b_experts": 3e-5,
    "g": 5e-3,
    "g_experts": 1e-3,
    "block": 1e-4,
    "more_block": 2e-4,
    "merge": 4e-6,
    "intra_hop": 5e-4,
    "intra_byte": 1e-9,
    "inter_hop": 2e-3,
    "inter_byte": 4e-9,
}


def measured_of(planted, noise=0.0, seed=0, repetitions=9, cases=None):
    """Times that a machine with these coefficients would give."""
    rng = np.random.default_rng(seed)
    machine = Fit(planted, SHAPE)
    return [
        Measured(case, tuple(machine.predicted_s(case) * rng.lognormal(0, noise, repetitions)))
        for case in cases or cases_of(ROOM)
    ]


values_of = partial(fit, resamples=0)  # where how sure they are does not matter


def test_planted_coefficients_are_found():
    found = values_of(measured_of(PLANTED), SHAPE)
    assert set(PLANTED) == set(NAMES)
    assert dict(found.values) == pytest.approx(PLANTED, rel=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_noise_changes_little(seed):
    measured = measured_of(PLANTED, noise=0.03, seed=seed)
    found = values_of(measured, SHAPE)
    for name in ("a", "b", "g"):
        assert found.values[name] == pytest.approx(PLANTED[name], rel=0.1), name
    for name in ("intra_hop", "inter_hop", "inter_byte"):  # small parts of what rings take
        assert found.values[name] == pytest.approx(PLANTED[name], rel=0.4), name
    held_out = [one for one in measured if one.case.is_held_out]
    assert {one.case.kind for one in held_out} == {COMPUTE, RING}
    assert np.median(abs(errors_of(found, held_out))) < 0.03


@pytest.mark.slow
def test_more_noise_makes_the_fits_to_other_repetitions_differ_more():
    def spread(noise):
        found = fit(measured_of(PLANTED, noise), SHAPE)
        values = [one.values["a"] for one in found.resampled]
        return np.quantile(values, 0.95) / np.quantile(values, 0.05) - 1

    assert spread(0.0) < 1e-6
    assert 0.002 < spread(0.03) < spread(0.2)


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_times_with_little_noise_can_be_used(noise):
    measured = measured_of(PLANTED, noise)
    found = fit(measured, SHAPE)
    assert noise_in(found, measured) is None and warnings_of(found) == []


@pytest.mark.parametrize("seed", range(2))
def test_times_too_noisy_to_use_are_named(seed):
    """A busy machine: a case takes e^2 times as long as another time, or a seventh."""
    measured = measured_of(PLANTED, noise=2.0, seed=seed, repetitions=3)
    found = noise_in(fit(measured, SHAPE), measured)
    assert found is not None and "too noisy" in found


@pytest.mark.parametrize("kind", [COMPUTE, RING])
def test_a_fit_that_misses_what_is_held_out_is_named(kind):
    """The machine was busy whenever a case of the kind ran that the fit has not seen."""
    measured = [
        dataclasses.replace(one, seconds=tuple(4 * s for s in one.seconds))
        if one.case.is_held_out and one.case.kind == kind
        else one
        for one in measured_of(PLANTED)
    ]
    found = noise_in(fit(measured, SHAPE), measured)
    assert found is not None and "held out by 75.0% in the median, expected at most 25%" in found


@pytest.mark.parametrize("name", ["b", "b_experts"])
def test_tokens_that_cost_nothing_are_refused_by_name(name):
    measured = measured_of(PLANTED | {name: 0.0})
    found = noise_in(fit(measured, SHAPE), measured)
    assert found is not None and f"found {name} = " in found


def test_what_is_bounded_badly_is_warned_of():
    sure, less = Fit(PLANTED, SHAPE), Fit(PLANTED | {"b": PLANTED["b"] / 4}, SHAPE)
    assert warnings_of(dataclasses.replace(sure, resampled=(sure,))) == []
    unsure = dataclasses.replace(sure, resampled=(sure, less))
    (warning,) = warnings_of(unsure)
    assert noise_in(unsure, []) is None and warning.startswith("b is uncertain")
    free = Fit(PLANTED | {"a": 0.0, "attention_b": 0.0}, SHAPE)
    (warning,) = warnings_of(dataclasses.replace(free, resampled=(free,)))
    assert "attention_b are 0" in warning


@pytest.mark.parametrize("name", ["attention_b", "g", "block", "more_block", "merge", "intra_hop"])
def test_what_costs_nothing_stays_zero(name):
    planted = PLANTED | {name: 0.0}
    if name == "g":
        planted["more_block"] = 0.0  # which is taken from g
    found = values_of(measured_of(planted), SHAPE)
    assert found.values[name] == pytest.approx(0.0, abs=1e-6 * PLANTED[name])
    assert found.values["a"] == pytest.approx(1e-8, rel=1e-6)
    noisy = values_of(measured_of(planted, noise=0.05), SHAPE)
    assert min(noisy.values.values()) >= 0.0


def test_the_planner_prices_as_the_fit_does():
    """A sequence alone, on one rank and in rings within a node and beyond."""
    found = values_of(measured_of(PLANTED), SHAPE)
    model = CostModel(
        **coefficients_of(found), kv_bytes_per_token=4096.0, num_layers=4, ranks_per_node=2
    )
    for length in (64, 512, 2048, 8192):
        alone = own_times_s(length, 4, model)
        whole = found.predicted_s(Case(COMPUTE, (length,)))
        assert whole == pytest.approx(alone[0], rel=1e-9)
        for degree in (2, 3, 4):
            ring = Case(RING, (length,), degree, leaves_node=degree > 2)
            assert found.predicted_s(ring) == pytest.approx(alone[degree - 1], rel=1e-9)


def test_a_model_with_windows_is_fitted_by_what_they_leave():
    windows = {"window_tokens": 200, "window_share": 0.5, "halo_bytes": 3e5}
    counted = dataclasses.replace(COUNTED, kv_bytes_per_token=2048.0, **windows)
    shape = Shape(layers=4, counted=counted)
    machine = Fit(PLANTED, shape)
    measured = [Measured(case, (machine.predicted_s(case),)) for case in cases_of(ROOM)]
    assert values_of(measured, shape).values == pytest.approx(PLANTED, rel=1e-6)
    # taken for a model without windows, attention is wrong
    assert values_of(measured, SHAPE).values["a"] < 0.8 * PLANTED["a"]


def test_further_blocks_take_no_more_than_g_has():
    planted = PLANTED | {"more_block": 1.0}
    model = coefficients_of(values_of(measured_of(planted), SHAPE))
    assert model["g"] == pytest.approx(0.0, abs=1e-9)
    assert model["block_s"] == pytest.approx(PLANTED["block"] + PLANTED["g"] / 8)


def test_transfers_by_themselves():
    wires = wires_of(measured_of(PLANTED))
    assert wires["intra"] == pytest.approx((5e-4, 1e-9))
    assert wires["inter"] == pytest.approx((2e-3, 4e-9))
    assert wires_of([]) == {}


ALONE = cases_of(dataclasses.replace(ROOM, ranks=1, has_experts=False))


def test_one_rank_tells_of_no_rings():
    found = values_of(measured_of(PLANTED | {"b_experts": 0.0}, cases=ALONE), SHAPE)
    assert set(found.values) == {"a", "attention_b", "b", "g", "block"}
    assert set(coefficients_of(found)) == {"a", "attention_b", "b", "g", "block_s"}


FEW = [one for one in ALONE if not one.is_held_out][:4]
EQUAL = [Case(kind, (64,) * n) for n in (1, 2, 3, 4) for kind in (COMPUTE, ATTENTION)]


@pytest.mark.parametrize(
    ("cases", "words"),
    [
        (FEW, r"4 cases were timed, expected at least 5.*--budget-sec"),
        (EQUAL, "4 coefficients, expected 5"),
    ],
)
def test_too_few_cases_and_too_similar_ones_are_refused(cases, words):
    with pytest.raises(ValueError, match=words):
        values_of(measured_of(PLANTED, cases=cases), SHAPE)


@pytest.mark.parametrize("seed", range(20))
def test_no_change_of_an_unknown_fits_better(seed):
    """The conditions of Karush, Kuhn and Tucker."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(12, 5)) * 10.0 ** rng.integers(-6, 6, 5)
    wanted = rng.normal(size=12)
    x = nonnegative(rows, wanted)
    gradient = (rows.T @ (wanted - rows @ x)) / np.linalg.norm(rows, axis=0)
    assert (x >= 0).all()
    assert abs(gradient[x > 0]).max(initial=0.0) < 1e-9
    assert (gradient[x == 0] < 1e-9).all()

"""Flags of a step's size: what they say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core import num_microbatches_calculator as megatrons

from megatron_hdp.data.mixture import BatchSize
from megatron_hdp.megatron.options import parse_arguments
from megatron_hdp.megatron.options.batch_sizes import ramp
from megatron_hdp.megatron.step import batch_size_of
from megatron_hdp.options import OptionError
from tests.megatron.options.test_refusals import ON, REQUIRED

STEPS = ["--step-batch-size-schedule", "0:4 1K:8, 0.01M:16"]
RAMP = ["--rampup-batch-size", "2", "3", "12"]
EIGHT = ["--global-batch-size", "8"]


def parsed(*flags):
    return parse_arguments([*REQUIRED, *ON.split(), *flags])


def test_sizes_grow():
    size = batch_size_of(parsed(*STEPS))
    assert size.growth == ((0, 4), (1000 // 128, 8), (10_000 // 128, 16)) and size.sequences == 16
    size = batch_size_of(parsed(*EIGHT, *RAMP))
    assert size.growth == ((0, 2), (6, 5), (12, 8))


def test_evaluation_has_the_last_size_or_its_own():
    for flags in (STEPS, [*EIGHT, *RAMP], EIGHT):
        arguments = parsed(*flags)
        last = batch_size_of(arguments, "valid")
        assert last.at(0) == batch_size_of(arguments).at(10**9) and not last.growth
        own = parsed(*flags, "--eval-global-batch-size", "3")
        assert batch_size_of(own, "valid").at(0) == 3
        assert batch_size_of(own) == batch_size_of(arguments)
    tokens = parsed("--hdp-global-batch-tokens", "500")
    assert batch_size_of(tokens, "valid").tokens == 500


def test_a_ramp_begins_small_and_ends_at_the_last_size():
    growth = ramp(2, 2, 12, 8)
    assert growth == ((0, 2), (4, 4), (8, 6), (12, 8))
    assert ramp(8, 2, 12, 8) == ramp(2, 2, 0, 8) == ()


@given(data=st.data())
def test_ramps_are_megatrons(data):
    kind = getattr(megatrons, "RampupBatchsizeNumMicroBatchesCalculator", None)
    if kind is None:
        pytest.skip("needs megatron-core 0.16 or 0.17")
    start, step = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    steps, over = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 400))
    last = start + step * steps
    theirs = kind(last, 1, 1, False, 1, start, step, over)
    ours = BatchSize(last, growth=ramp(start, step, over, last))
    for drawn in range(over + 3):
        theirs.update(drawn, consistency_check=False)
        assert ours.at(drawn) == theirs.current_global_batch_size


@pytest.mark.parametrize(
    "numbers", [(0, 2, 8, 8), (2, 0, 8, 8), (2, 2, -1, 8), (2, 4, 8, 8), (10, 2, 8, 8)]
)
def test_numbers_that_lead_nowhere_are_refused(numbers):
    with pytest.raises(OptionError, match="--rampup-batch-size .*increments"):
        ramp(*numbers)

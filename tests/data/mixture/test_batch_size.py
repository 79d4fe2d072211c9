"""The size of a step is a function of what was drawn before, Megatron's where that grows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core import num_microbatches_calculator as megatrons

from megatron_hdp.data.mixture import BatchSize, Position, ramp
from tests.support.mixtures import mixture

LENGTHS = {"s": list(range(1, 40))}


def test_a_ramp_begins_small_and_ends_at_the_last_size():
    size = ramp(2, 2, 12, 8)
    assert size.growth == ((0, 2), (4, 4), (8, 6), (12, 8))
    assert [size.at(drawn) for drawn in (0, 3, 4, 11, 12, 10**9)] == [2, 2, 4, 6, 8, 8]


@given(data=st.data())
def test_ramps_are_megatrons(data):
    kind = getattr(megatrons, "RampupBatchsizeNumMicroBatchesCalculator", None)
    if kind is None:
        pytest.skip("needs megatron-core 0.16 or 0.17")
    start, step = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    steps, over = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 400))
    last = start + step * steps
    theirs = kind(last, 1, 1, False, 1, start, step, over)
    ours = ramp(start, step, over, last)
    for drawn in range(over + 3):
        theirs.update(drawn, consistency_check=False)
        assert ours.at(drawn) == theirs.current_global_batch_size


@pytest.mark.parametrize(
    "numbers", [(0, 2, 8, 8), (2, 0, 8, 8), (2, 2, -1, 8), (2, 4, 8, 8), (10, 2, 8, 8)]
)
def test_numbers_that_lead_nowhere_are_refused(numbers):
    with pytest.raises(ValueError, match="--rampup-batch-size .* change a number"):
        ramp(*numbers)


@pytest.mark.parametrize(
    "settings",
    [
        {"sequences": 4, "growth": ((1, 2), (3, 4))},
        {"sequences": 4, "growth": ((0, 2), (3, 4), (3, 5))},
        {"tokens": 4, "growth": ((0, 2),)},
        {"sequences": 4, "growth": ((0, 0),)},
    ],
)
def test_growth_that_is_none_is_refused(settings):
    with pytest.raises(ValueError, match="sizes of a global batch"):
        BatchSize(**settings)


def test_steps_grow_and_every_row_is_drawn_as_often_as_without():
    growing = mixture(LENGTHS, weights={"s": 1.0}, batch=ramp(1, 2, 10, 5))
    position, rows, sizes = Position(), [], []
    while position.sequences < 39:
        step = growing.step(position)
        again = growing.step(Position.from_record(position.to_record()))  # as after a resume
        assert again.rows.tolist() == step.rows.tolist()
        rows += step.rows.tolist()
        sizes.append(len(step.rows))
        position = step.after
    assert sizes[:9] == [1, 1, 1, 1, 1, 3, 3, 5, 5]
    plain = mixture(LENGTHS, weights={"s": 1.0}, batch=BatchSize(39)).step(Position())
    assert rows[:39] == plain.rows.tolist()

"""The size of a step is a function of what was drawn before."""

import pytest

from megatron_hdp.data.mixture import BatchSize, Position
from tests.support.mixtures import mixture

LENGTHS = {"s": list(range(1, 40))}


GROWING = BatchSize(5, growth=((0, 1), (5, 3), (10, 5)))


def test_the_size_depends_on_what_was_drawn():
    assert [GROWING.at(drawn) for drawn in (0, 4, 5, 9, 10, 10**9)] == [1, 1, 3, 3, 5, 5]
    assert BatchSize(4).at(7) == 4 and BatchSize(tokens=9).at(7) is None


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
    growing = mixture(LENGTHS, weights={"s": 1.0}, batch=GROWING)
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

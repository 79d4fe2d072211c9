"""Every degree has its colour, the same in every plan, and neighbours can be told apart."""

import numpy as np
import pytest

from megatron_hdp.simulator.palette import IDLE, Palette, is_dark, pale


def parts(colour):
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


def test_few_degrees_have_a_colour_each():
    palette = Palette.of_degrees(np.array([3, 1, 3, 8]), 8)
    assert palette.groups == ((1, 1), (3, 3), (8, 8))
    assert [palette.index(d) for d in (1, 3, 8)] == [0, 1, 2]
    assert len(set(palette.colours)) == 3


def test_many_degrees_share_a_colour_by_powers_of_two():
    palette = Palette.of_degrees(np.arange(1, 34), 64)
    assert palette.groups == ((1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32), (33, 33))
    assert palette.index(16) == palette.index(9) == 4


def test_a_colour_means_the_same_degree_in_every_plan():
    """All ranks are dark even when every ring takes all of them; close degrees stay apart."""
    dark = Palette.of_degrees(np.array([1, 8]), 8).colours[-1]
    assert Palette.of_degrees(np.array([8]), 8).colours == (dark,)
    light = Palette.of_degrees(np.array([1, 8]), 8).colours[0]
    assert Palette.of_degrees(np.array([1]), 8).colours == (light,)
    near, far = map(parts, Palette.of_degrees(np.array([1023, 1024]), 1024).colours)
    assert sum(abs(a - b) for a, b in zip(near, far, strict=True)) > 25


def test_names():
    assert Palette.of_degrees(np.array([1, 5]), 8).names == ("degree 1", "degree 5")
    assert Palette.of_degrees(np.arange(1, 34), 64).names[3] == "degree 5 to 8"


def test_text_shows_on_every_colour():
    light, *_, dark = Palette.of_degrees(np.array([1, 2, 8]), 8).colours
    assert is_dark(dark) and not is_dark(light) and not is_dark(pale(light))


@pytest.mark.parametrize(("colour", "paler"), [("#000000", "#808080"), ("#ffffff", "#ffffff")])
def test_pale_is_half_way_to_white(colour, paler):
    assert pale(colour) == paler


def test_one_rank_is_not_taken_for_idle():
    (one,) = Palette.of_degrees(np.array([1]), 1024).colours
    assert max(abs(a - b) for a, b in zip(parts(one), parts(IDLE), strict=True)) > 40

"""Layouts of a pipeline as text."""

import pytest

from megatron_hdp.options import OptionError
from megatron_hdp.planner.stages import parts_of


@pytest.mark.parametrize(
    ("layout", "layers"),
    [
        ("EtL", [1]),
        ("Et|tL", [1, 1]),
        ("E|t*3|tt,L", [0, 3, 2]),
        ("Ett|(ttt|)*2,ttL", [2, 3, 3, 2]),
        ("E|(t*2|)*3|L", [0, 2, 2, 2, 0, 0]),
        ("Et||*2t|L", [1, 0, 0, 1, 0]),
        ("E(t|t)*2|tL", [1, 2, 1, 1]),
        ("Et*12|t*0|tL", [12, 0, 1]),
    ],
)
def test_layers_of_each_part(layout: str, layers: list[int]) -> None:
    assert list(parts_of(layout)) == layers


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("Et|m|L", "found m, multi-token prediction, which HDP does not know"),
        ("Et|xL", "found 'x', expected E (embedding), t (a layer), L (loss)"),
        ("E t|L", "found ' '"),
        ("E(t|)L", "found '('"),
        ("Et*2*2|L", "found '*'"),
        ("", "expected one E, first in the first part"),
        ("tE|tL", "expected one E, first in the first part"),
        ("|Et|tL", "found (empty), Et, tL: move them"),
        ("Et|tL|", "found Et, tL, (empty): move them"),
        ("EEt|tL", "expected one E"),
        ("Et|tLt", "one L, last in the last part"),
        ("Et|Lt|t|t|tL", "found Et, Lt, ..., tL"),
        ("Et*99999999999999|L", "expected at most 100,000: repeat less"),
        ("E(t*900)*900|L", "expected at most 100,000: repeat less"),
    ],
)
def test_what_is_no_layout_is_refused(layout: str, message: str) -> None:
    with pytest.raises(OptionError) as error:
        parts_of(layout)
    assert message in str(error.value)

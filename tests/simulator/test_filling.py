"""A template's places are filled once, and what fills them is only text."""

from pathlib import Path

import numpy as np
import pytest

from megatron_hdp.simulator.filling import encoded, script_data, write_filled


def test_places_in_what_was_filled_in_stay(tmp_path: Path) -> None:
    path = tmp_path / "p.html"
    write_filled(path, "a__X__b__NUMBERS__c__Y__", {"__X__": "__Y__", "__Y__": "__X__\\1"})
    text = path.read_text()
    assert text.startswith("a__Y__b") and text.endswith("c__X__\\1")
    assert "function ticks" in text
    assert [file.name for file in tmp_path.iterdir()] == ["p.html"]


@pytest.mark.parametrize("template", ["__NUMBERS__", "__NUMBERS____X____X__"])
def test_a_place_that_is_missing_or_twice_is_ours(tmp_path: Path, template: str) -> None:
    with pytest.raises(AssertionError):
        write_filled(tmp_path / "p.html", template, {"__X__": ""})
    assert not list(tmp_path.iterdir())


def test_data_cannot_close_its_script() -> None:
    assert script_data({"a": "</script>"}) == '{"a":"\\u003c/script>"}'


def test_arrays() -> None:
    assert encoded(np.array([1, 258], dtype=np.int32)) == ("i", "AQAAAAIBAAA=")
    assert encoded(np.array([True]).astype(np.uint8)) == ("b", "AQ==")

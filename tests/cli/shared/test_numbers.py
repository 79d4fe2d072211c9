"""Speeds come one a line, one line a rank; anything else is named by file and line."""

import pytest

from megatron_hdp.cli.shared.numbers import read_speeds


def read(tmp_path, text, ranks=2):
    path = tmp_path / "speeds.txt"
    path.write_text(text)
    return read_speeds(str(path), ranks)


def test_speeds(tmp_path):
    assert read(tmp_path, "1\n0.5\n\n 1e0 \n", ranks=3) == (1.0, 0.5, 1.0)


@pytest.mark.parametrize("word", ["fast", "0", "-1", "nan", "inf", "1,5"])
def test_a_bad_line_is_named(tmp_path, word):
    with pytest.raises(ValueError, match=rf"speeds\.txt, line 2: found '{word}', expected the sp"):
        read(tmp_path, f"1\n{word}\n")


def test_one_line_a_rank(tmp_path):
    with pytest.raises(ValueError, match=r"speeds\.txt has 3 speeds, expected one .* --ranks 2"):
        read(tmp_path, "1\n1\n1\n")

"""Speeds come one a line, one line a rank; anything else is named by file and line."""

import pytest

from megatron_hdp.cli.shared.numbers import read_speeds


def read(tmp_path, text, ranks=2):
    path = tmp_path / "speeds.txt"
    path.write_text(text)
    return read_speeds(str(path), ranks)


def test_speeds(tmp_path):
    assert read(tmp_path, "1\n0.5\n\n 1e0 \n", ranks=3) == (1.0, 0.5, 1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(
            (f"1\n{word}\n", f"line 2: found '{word}'")
            for word in ("fast", "0", "-1", "nan", "inf")
        ),
        ("1\n1,5\n", r"speeds\.txt, line 2: found '1,5', expected the sp"),
        ("1\n1e-300\n", r"line 2: found '1e-300', expected the speed of one rank, .* 1e-06"),
        ("1\n1\n1\n", r"speeds\.txt has 3 speeds, expected one .* --ranks 2"),
    ],
)
def test_a_bad_file_is_named(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, text)

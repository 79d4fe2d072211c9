"""A file is there when it is complete, or not at all."""

import os
from pathlib import Path

import pytest

from megatron_hdp.simulator.files import complete_file


def test_the_file_appears_at_the_end(tmp_path):
    with complete_file(tmp_path / "a") as temporary:
        Path(temporary).write_text("whole")
        assert not (tmp_path / "a").exists()
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_text() == "whole"


def test_a_failure_keeps_the_old_file(tmp_path):
    (tmp_path / "a").write_text("old")
    with pytest.raises(OSError, match="disk full"), complete_file(tmp_path / "a") as temporary:
        Path(temporary).write_text("ha")
        raise OSError("disk full")
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_text() == "old"

"""``megatron-hdp verify`` says which checkpoint to go on from, without torch where it can."""

import json

import pytest

from megatron_hdp.cli.main import main
from megatron_hdp.megatron.checkpoint.folder import TRACKER
from tests.megatron.checkpoint.small import flip, save_small


@pytest.fixture
def folder(tmp_path):
    for iteration in (2, 4, 6):
        save_small(tmp_path, iteration, with_checksums=iteration != 2)
    return tmp_path


def test_all_good(folder, capsys):
    assert main(["verify", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert printed.count(" good   ") == 3 and "without checksums" in printed.splitlines()[0]
    assert f"the latest good one is iteration 6: --load {folder} takes it" in printed


def test_the_latest_is_damaged(folder, capsys):
    flip(folder / "iter_0000006" / "__0_0.distcp", -100)
    assert main(["verify", str(folder)]) == 1
    printed = capsys.readouterr().out
    assert "iteration 6         damaged" in printed and "found the XXH3" in printed
    assert f"the latest good one is iteration 4: --load {folder} --ckpt-step 4" in printed


def test_none_is_good(folder, capsys):
    for place in folder.glob("iter_*"):
        (place / "common.pt").unlink()
    assert main(["verify", str(folder)]) == 1
    assert "none is good" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text, named, expected", [(None, None, 6), ("garbage", None, 6), ("9", 9, 6), ("4", 4, 4)]
)
def test_the_tracker(folder, capsys, text, named, expected):
    (folder / TRACKER).unlink()
    if text is not None:
        (folder / TRACKER).write_text(text)
    assert main(["verify", str(folder), "--json"]) == (0 if text == "4" else 1)
    report = json.loads(capsys.readouterr().out)
    assert report["tracker"] == named and report["latest_good"] == expected
    assert (report["trouble"] is None) == (text == "4")
    assert [one["is_good"] for one in report["checkpoints"]] == [True] * 3


def test_nothing_to_check(tmp_path, capsys):
    assert main(["verify", str(tmp_path)]) == 2
    assert main(["verify", str(tmp_path / "gone")]) == 2
    printed = capsys.readouterr().err
    assert "no folder iter_" in printed and "no such folder" in printed

"""``megatron-hdp plan --items``: what it prints and writes, and what it refuses."""

import json
import re

import numpy as np
import pytest

from megatron_hdp.cli.main import main
from megatron_hdp.cli.shared.item_sizes import read_sizes
from megatron_hdp.media import ENCODERS, ITEM_STRATEGIES

QWEN3 = ENCODERS["qwen3-vl"]


@pytest.fixture
def sizes(tmp_path):
    path = tmp_path / "sizes.txt"
    path.write_text("# of a step\n" + "1024 1024\n\n480 640  # a photo\n720 1280 8\n" * 20)
    return path


def run(*arguments):
    try:
        return main(["plan", *map(str, arguments)])
    except SystemExit as leaving:  # a flag's own mistake
        return leaving.code


def test_what_a_file_holds(sizes):
    """A video of eight frames is four items, each of two."""
    found = read_sizes(str(sizes), QWEN3.resizing)
    assert (found.num_images, found.num_videos) == (40, 20)
    per_frame = QWEN3.resizing.patches(720, 1280, 8)[0]
    assert found.patches[:6].tolist() == [4096, 1200, *[per_frame] * 4]
    assert len(found.patches) == 120


def test_summary(sizes, capsys):
    assert run("--items", sizes, "--ranks", 4) == 0
    text = capsys.readouterr().out
    assert text.startswith("40 images and 20 videos: 120 items, ")
    assert "\n  encoder              qwen3-vl" in text
    efficiency = float(re.search(r"efficiency +(\S+)", text)[1])
    assert 0.95 < efficiency <= 1


def test_every_strategy_has_a_row(sizes, capsys):
    """And ours is the fastest of them."""
    flags = ("--compare", "--encoder", "qwen2.5-vl", "--replica-ranks", 2, "--micro-batches", 3)
    assert run("--items", sizes, "--ranks", 4, *flags) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == list(ITEM_STRATEGIES)
    efficiency = [float(row[1]) for row in rows]
    assert max(efficiency) == efficiency[-1] > min(efficiency)


def test_the_plan_as_json(sizes, tmp_path, capsys):
    """Slow ranks get less of it."""
    (tmp_path / "speeds.txt").write_text("1\n0.25\n")
    output = tmp_path / "plan.json"
    flags = ("--rank-speeds", tmp_path / "speeds.txt", "--output", output)
    assert run("--items", sizes, "--ranks", 2, *flags) == 0
    plan = json.loads(output.read_text())
    assert plan["strategy"] == "step" and len(plan["patches"]) == len(plan["degrees"]) == 120
    held = np.bincount(plan["first_ranks"], weights=plan["patches"])
    assert held[1] < held[0] / 2


@pytest.mark.parametrize("flags", [(), ("--compare",)])
def test_a_picture_of_it(sizes, tmp_path, capsys, flags):
    """A chart a strategy."""
    matplotlib = pytest.importorskip("matplotlib", reason="pip install 'megatron-hdp[plot]'")
    pytest.importorskip("matplotlib.image")
    assert run("--items", sizes, "--ranks", 4, *flags, "--plot", tmp_path / "who.png") == 0
    assert f"picture written to {tmp_path}/who.png" in capsys.readouterr().out
    pixels = matplotlib.image.imread(tmp_path / "who.png")[:, :, :3]
    blue = matplotlib.colors.to_rgb("#225ea8")
    at = np.all(np.abs(pixels - blue) < 0.01, axis=2).any(axis=1)
    assert pixels.shape[0] > (700 if flags else 150) and at.sum() > (200 if flags else 40)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "found no size"),
        ("10 x\n", "line 1: found '10 x'; a line is HEIGHT WIDTH"),
        ("10 10\n\n1 2 3 4\n", "line 3: found 4 numbers"),
        ("10 0\n", "line 1: found 10 x 0 pixels"),
        ("10 10000\n", "line 1: found 10 x 10000 pixels, expected one side at most 200 times"),
    ],
)
def test_a_file_that_is_none(text, why, tmp_path, capsys):
    (tmp_path / "sizes.txt").write_text(text)
    assert run("--items", tmp_path / "sizes.txt", "--ranks", 2) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and why in error


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--offload", "auto"], "--offload has no effect on --items"),
        (["--tokens-per-rank", 8], "--tokens-per-rank has no effect on --items"),
        (["--lengths", "preset:github"], "not allowed with"),
        (["--plot", "who.xyz"], "expected a name that ends in"),
        (["--output", "sizes.txt"], "--output sizes.txt is the file of --items as well"),
        (["--patches-per-pack", 64], "found an item of 4096 patches; expected at most 64 in a"),
    ],
)
def test_flags_that_do_not_go_together(flags, why, sizes, monkeypatch, capsys):
    monkeypatch.chdir(sizes.parent)
    assert run("--items", "sizes.txt", "--ranks", 2, *flags) == 2
    assert why in capsys.readouterr().err


def test_flags_of_items_beside_lengths(capsys):
    """None of them has an effect there."""
    flags = ("--lengths", "preset:github", "--ranks", 2, "--encoder", "clip-l-336")
    assert run(*flags, "--tokens-per-rank", 1024) == 2
    assert "--encoder has no effect on --lengths: leave it out" in capsys.readouterr().err
    assert run("--lengths", "preset:github", "--ranks", 2) == 2
    assert "--tokens-per-rank: found none" in capsys.readouterr().err


def test_choices_are_those_that_there_are():
    """The command's help is there before anything is imported, so it names them itself."""
    from megatron_hdp.cli.main import build_parser

    for name in ENCODERS:
        words = ["plan", "--items", "f", "--ranks", "2", "--encoder", name]
        assert build_parser().parse_args(words).encoder == name
    for name in ITEM_STRATEGIES:
        words = ["plan", "--items", "f", "--ranks", "2", "--media-balance", name]
        assert build_parser().parse_args(words).media_balance == name

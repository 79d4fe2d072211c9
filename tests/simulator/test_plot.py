"""The picture is written whole or not at all, and its colours and bars say what the plan says."""

import os
import sys

import numpy as np
import pytest

from megatron_hdp.planner import LLAMA_7B, evaluate, plan
from megatron_hdp.simulator.plot import _Palette, plot_plan
from tests.simulator.test_lanes import COST, plan_of

matplotlib = pytest.importorskip("matplotlib", reason="pip install 'megatron-hdp[plot]'")


def made_and_evaluation(ranks=4, num_sequences=20):
    lengths = np.random.default_rng(0).integers(1, 3000, size=num_sequences)
    made = plan(lengths, ranks=ranks, tokens_per_rank=3000)
    return made, evaluate(made, LLAMA_7B)


@pytest.mark.parametrize("ranks", [1, 4, 200])
def test_writes_a_picture_and_nothing_else(tmp_path, ranks):
    made, evaluation = made_and_evaluation(ranks, num_sequences=4 * ranks)
    plot_plan(made, evaluation, tmp_path / "plan.png", title="a title")
    assert os.listdir(tmp_path) == ["plan.png"]
    pixels = matplotlib.image.imread(tmp_path / "plan.png")
    assert pixels.shape[1] >= 1200
    assert np.ptp(pixels[:, :1200, 0]) > 0.5  # neither blank nor one colour


def test_idle_time_and_local_sequences_are_seen(tmp_path):
    made = plan_of([30, 4], [{"ranks": [0, 1], "sequences": [0], "local": {"1": [1]}}], num_ranks=2)
    plot_plan(made, evaluate(made, COST), tmp_path / "plan.png")
    pixels = matplotlib.image.imread(tmp_path / "plan.png")[:, :1400, :3]  # without the legend

    def share(colour):
        wanted = matplotlib.colors.to_rgb(colour)
        return np.mean(np.all(np.abs(pixels - wanted) < 0.01, axis=2))

    # 15 s of ring on both; rank 1 then has 4 s of its own while rank 0 waits for it
    assert share("#f28e2b") > 0.01
    assert share("#e4e4e4") == pytest.approx(share("#f28e2b"), rel=0.1)


def test_suffix_gives_the_format(tmp_path):
    plot_plan(*made_and_evaluation(), tmp_path / "plan.svg")
    assert b"<svg" in (tmp_path / "plan.svg").read_bytes()
    with pytest.raises(ValueError, match=r"plan\.txt: expected a name that ends in .*\.png"):
        plot_plan(*made_and_evaluation(), tmp_path / "plan.txt")
    assert os.listdir(tmp_path) == ["plan.svg"]


def test_a_failure_leaves_nothing(tmp_path, monkeypatch):
    def fail(self, path, **options):
        open(path, "wb").close()
        raise OSError("disk full")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fail)
    with pytest.raises(OSError, match="disk full"):
        plot_plan(*made_and_evaluation(), tmp_path / "plan.png")
    assert os.listdir(tmp_path) == []


def test_few_degrees_have_a_colour_each():
    palette = _Palette.of_degrees(np.array([3, 1, 3, 8]), 8)
    assert palette.groups == ((1, 1), (3, 3), (8, 8))
    assert [palette.index(d) for d in (1, 3, 8)] == [0, 1, 2]
    assert len(set(palette.colours)) == 3


def test_many_degrees_share_a_colour_by_powers_of_two():
    palette = _Palette.of_degrees(np.arange(1, 34), 64)
    assert palette.groups == ((1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32), (33, 33))
    assert palette.index(16) == palette.index(9) == 4


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    class Absent:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] == "matplotlib":
                raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")

    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    with pytest.raises(ImportError, match=r"pip install 'megatron-hdp\[plot\]'"):
        plot_plan(*made_and_evaluation(), tmp_path / "plan.png")


def test_a_colour_means_the_same_degree_in_every_plan():
    """All ranks are dark even when every ring takes all of them; close degrees stay apart."""
    dark = _Palette.of_degrees(np.array([1, 8]), 8).colours[-1]
    assert _Palette.of_degrees(np.array([8]), 8).colours == (dark,)
    light = _Palette.of_degrees(np.array([1, 8]), 8).colours[0]
    assert _Palette.of_degrees(np.array([1]), 8).colours == (light,)
    near = np.array(_Palette.of_degrees(np.array([1023, 1024]), 1024).colours)
    assert np.abs(near[0] - near[1]).sum() > 0.1

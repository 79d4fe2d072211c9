"""The picture is written whole or not at all, and its colours and bars say what the plan says."""

import os
import sys

import numpy as np
import pytest

from megatron_hdp.planner import LLAMA_7B, evaluate, plan
from megatron_hdp.simulator.palette import IDLE, LOCAL, Palette, pale
from megatron_hdp.simulator.plot import plot_plan
from tests.simulator.test_plan_bars import COST, plan_of

matplotlib = pytest.importorskip("matplotlib", reason="pip install 'megatron-hdp[plot]'")
pytest.importorskip("matplotlib.axes")


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


def share(pixels, colour):
    """Of the pixels, those of a colour."""
    return np.mean(np.all(np.abs(pixels - matplotlib.colors.to_rgb(colour)) < 0.01, axis=2))


def test_idle_time_and_local_sequences_are_seen(tmp_path):
    made = plan_of([30, 4], [{"ranks": [0, 1], "sequences": [0], "local": {"1": [1]}}], num_ranks=2)
    plot_plan(made, evaluate(made, COST), tmp_path / "plan.png")
    pixels = matplotlib.image.imread(tmp_path / "plan.png")[:, :1400, :3]  # without the legend

    # 15 s of ring on both; rank 1 then has 4 s of its own while rank 0 waits for it
    local, idle = share(pixels, LOCAL), share(pixels, IDLE)
    assert local > 0.01
    assert idle == pytest.approx(local, rel=0.1)


@pytest.mark.parametrize("ranks", [2, 200])
def test_stages_are_drawn(tmp_path, ranks):
    """All stages of few ranks, the first stage of many; each with its forwards and backwards."""
    ring = {"ranks": list(range(ranks)), "sequences": [0]}
    made = plan_of([60 * ranks], [ring], num_ranks=ranks)
    plot_plan(made, evaluate(made, COST, 2), tmp_path / "plan.png")
    pixels = matplotlib.image.imread(tmp_path / "plan.png")[:, :, :3]
    (colour,) = Palette.of_degrees(np.array([ranks]), ranks).colours

    # 10 s forward and 20 s backward on each stage, 60 s in all: half of the time is idle
    forward = share(pixels, pale(colour))
    assert share(pixels, colour) == pytest.approx(2 * forward, rel=0.15)
    assert share(pixels, IDLE) == pytest.approx(3 * forward, rel=0.15)


@pytest.mark.parametrize("chunks", [1, 2])
def test_bars_name_their_chunk(tmp_path, monkeypatch, chunks):
    """Of virtual stages alone: one row a stage holds all of its chunks."""
    made = plan_of([60, 30], [{"ranks": [0], "sequences": [m]} for m in (0, 1)], num_ranks=1)
    texts, text = [], matplotlib.axes.Axes.text

    def noting(self, x, y, label, **others):
        texts.append(label)
        return text(self, x, y, label, **others)

    monkeypatch.setattr(matplotlib.axes.Axes, "text", noting)
    plot_plan(made, evaluate(made, COST, 2, chunks), tmp_path / "plan.png")
    named = {label.partition("chunk ")[2] for label in texts}
    assert named == ({"0", "1"} if chunks == 2 else {""})


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

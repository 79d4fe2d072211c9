"""A plan without and with virtual stages, one above the other: drawn, and the second is faster."""

import sys
from pathlib import Path

import pytest

from tests.support.scripts import script_module

pytest.importorskip("matplotlib", reason="pip install 'megatron-hdp[plot]'")

ROOT = Path(__file__).parents[3]
CONFIG = str(ROOT / "configs" / "bytescale" / "llama-70b-2m.yaml")


@pytest.fixture(scope="module")
def script():
    with script_module("dev/plot_pipelines.py") as module:
        yield module


def test_the_picture(script, tmp_path, monkeypatch, capsys):
    picture = tmp_path / "virtual.png"
    argv = ["plot", CONFIG, "--gpus", "8192", "--virtual-stages", "1,5", "--output", str(picture)]
    monkeypatch.setattr(sys, "argv", argv)
    script.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" on each stage")[0] for line in lines] == ["1 part", "5 virtual stages"]
    plain, virtual = (float(line.split("efficiency ")[1]) for line in lines)
    assert virtual > plain + 0.05
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_every_shown_stage_has_its_work(script):
    one = script.planned(CONFIG, 8192, 5, "byted")
    assert one.times.model_chunks == 5
    (axes,) = script.draw([one]).axes
    assert axes.get_ylim() == (2 * script.SHOWN - 0.5, -0.5)
    assert len(axes.get_yticks()) == script.SHOWN
    drawn = sum(len(one.get_paths()) for one in axes.collections)
    ranks = [int(label.get_text()) for label in axes.get_yticklabels()]
    passes = 2 * 2 * 5 * sum(len(one.plan.micro_batches_of(rank)) for rank in ranks)
    assert drawn == passes + 2 * script.SHOWN

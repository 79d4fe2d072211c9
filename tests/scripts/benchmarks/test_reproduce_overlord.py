"""The simulations beside OVERLORD, and of pictures in the gaps of pipelines, on small steps."""

import importlib
import sys
from dataclasses import replace

import numpy as np
import pytest

from tests.docs.pages import ROOT


@pytest.fixture(scope="module")
def scripts():
    """The two scripts as modules."""
    folder = str(ROOT / "scripts" / "benchmarks")
    sys.path.insert(0, folder)
    yield [importlib.import_module(name) for name in ("reproduce_overlord", "bench_gaps")]
    sys.path.remove(folder)


@pytest.fixture
def small(scripts, monkeypatch):
    """Steps of few tokens on few GPUs."""
    overlord, _ = scripts
    monkeypatch.setattr(overlord, "TOKENS", 500_000)
    models = [replace(one, groups=2, tensor_ranks=1) for one in overlord.MODELS[1:]]
    monkeypatch.setattr(overlord, "MODELS", models)
    return overlord


def test_largest_differencing_by_hand(scripts):
    """8, 7, 6, 5, 4 in two: 8 - 7, then 6 - 5, 4 - 1 and 3 - 1 leave 2; the best there is has 0."""
    weights = np.array([8.0, 7.0, 6.0, 5.0, 4.0])
    bins = scripts[0].karmarkar_karp(weights, 2)
    assert sorted(i for one in bins for i in one) == list(range(5))
    assert sorted(weights[one].sum() for one in bins) == [14, 16]
    thirds = scripts[0].karmarkar_karp(np.ones(9), 3)
    assert [len(one) for one in thirds] == [3, 3, 3]


def test_ours_is_fastest_and_nothing_beats_the_bound(small):
    """Every way trains each sample once, within the capacity."""
    for cell in small.all_cells():
        if cell.encoder == "ViT-1B" and cell.context == "8K":
            samples, cost = small.drawn(cell, 0), cell.model.cost()
            for groups in (small.in_order(samples, cell), small.balanced(samples, cell, cost)):
                small.plan_of(groups, samples, cell).validate(num_layers=cost.num_layers)
            steps = small.simulated(cell, 0)
            assert steps.bound <= steps.ours <= steps.hybrid <= steps.backbone
            assert steps.backbone <= 1.01 * steps.unbalanced


def test_it_prints_its_tables(small, capsys):
    assert small.main(["--cells", "tMoE-25B ViT-1B coyo 4K", "--steps", "1"]) == 0
    printed = capsys.readouterr().out
    assert "| tMoE-25B ViT-1B coyo 4K | 16 |" in printed and "\n| 4K | " in printed
    with pytest.raises(SystemExit):
        small.main(["--cells", "none"])


def test_pictures_in_gaps_take_next_to_nothing(scripts, capsys, monkeypatch):
    _, gaps = scripts
    layouts = [replace(gaps.LAYOUTS[4], hdp_ranks=16)]
    monkeypatch.setattr(gaps, "LAYOUTS", layouts)
    gaps.main(["--seeds", "1"])
    assert "| LongCat-Flash-Omni, 27B active | 128 | 8 |" in capsys.readouterr().out
    found = gaps.measured(layouts[0], 0)
    assert found.apart <= found.inside < found.outside and found.apart < 1.005
    assert 0.1 < found.of_bubble < 0.5

"""The pictures of docs/concepts.md are drawn, all of them, and show what their numbers say."""

import re
from pathlib import Path

import pytest

from tests.support.scripts import script_module

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def script():
    with script_module("dev/plot_concepts.py") as module:
        yield module


def test_the_page_shows_every_picture(script, tmp_path):
    script.main(str(tmp_path))
    drawn = {path.name for path in tmp_path.iterdir()}
    page = (ROOT / "docs" / "concepts.md").read_text()
    assert drawn == set(re.findall(r"\]\((concept-\w+\.svg)\)", page))
    assert all((ROOT / "docs" / name).exists() for name in drawn)


@pytest.mark.parametrize("name", ["mesh", "pipelines"])
def test_the_page_says_the_times_of_the_picture(script, name):
    titles = [axes.get_title(loc="left") for axes in script.PICTURES[name]().axes]
    mesh, hdp = (float(re.search(r": (.*) s,", title)[1]) for title in titles)
    assert hdp < mesh
    told = f"{mesh:.2f} s on the mesh, {hdp:.2f} s under HDP](concept-{name}.svg)"
    assert told in (ROOT / "docs" / "concepts.md").read_text()


@pytest.mark.parametrize(("layers", "ratio"), [(6, 0.5), (6, 0), (8, 1), (3, 0.25)])
def test_what_stays_on_the_device_is_equation_3(script, layers, ratio):
    moments, held = script.resident(layers, ratio)
    assert max(held) == pytest.approx(2 + (1 - ratio) * (layers - 2))
    assert held[0] == held[-1] == 0
    assert moments[held.index(max(held))] == pytest.approx(layers)

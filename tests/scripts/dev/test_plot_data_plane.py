"""The picture of docs/data-plane.md shows every role of its table, as it was drawn."""

import re
from pathlib import Path

import pytest

from tests.support.scripts import script_module

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "data-plane.md").read_text()


@pytest.fixture(scope="module")
def script():
    with script_module("dev/plot_data_plane.py") as module:
        yield module


def told(page):
    """The roles of the table under "Who does what"."""
    part = page.split("## Who does what")[1].split("A step's way")[0]
    return set(re.findall(r"^\| ([a-z ]+) \| (?!how many)", part, re.MULTILINE))


def test_the_page_shows_it_and_tells_its_roles(script, tmp_path):
    script.main(str(tmp_path))
    (drawn,) = tmp_path.iterdir()
    assert f"]({drawn.name})" in PAGE and (ROOT / "docs" / drawn.name).exists()
    texts = [text.get_text().split("\n")[0] for text in script.roles().axes[0].texts]
    for role in script.ROLES:
        assert role in texts
    assert told(PAGE) == set(script.ROLES)
    assert told(PAGE.replace("| host |", "| guest |")) != set(script.ROLES)


def test_nothing_is_drawn_outside_of_it(script):
    figure = script.roles()
    figure.draw_without_rendering()
    (axes,) = figure.axes
    for drawn in (*axes.texts, *axes.patches):
        box = drawn.get_window_extent()
        assert box.x0 >= 0 <= box.y0
        assert box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, drawn

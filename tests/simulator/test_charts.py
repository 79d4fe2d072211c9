"""Charts of the kinds that reports have, in a picture and on a page."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from megatron_hdp.simulator.charts import Chart, draw, on_page, save
from megatron_hdp.simulator.page import write_page
from tests.simulator.browser import needs_node, seen_on

PILES = Chart(
    **{"kind": "piles", "title": "parts", "x_label": "x", "y_label": "y", "unit": "s"},
    x=["long", "short"],
    series={"a": [10.0, 2.0], "b": [30.0, 1.0]},
    x_end=20.0,
)
STAIRS = Chart(
    **{"kind": "stairs", "title": "memory", "x_label": "t", "y_label": "m", "unit": "bytes"},
    series={"one": [5e9, 9e9, 1e9], "two": [4e9, 2e9]},
    own_x={"one": [0.0, 4.0, 30.0], "two": [0.0, 3.0]},
    limits={"has": 8e9},
    x_unit="s",
    x_end=10.0,
)


def axes_of(chart: Chart):  # type: ignore[no-untyped-def]
    axes = Figure().add_subplot()
    draw(axes, chart)
    return axes


def test_piles_of_a_picture_are_cut_and_say_their_sum() -> None:
    axes = axes_of(PILES)
    edges = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in axes.patches]
    assert edges == [(0, 10), (0, 2), (10, 20), (2, 3)]
    assert [text.get_text() for text in axes.texts] == [" 40, cut", " 3"]


def test_stairs_of_a_picture_have_places_and_limits() -> None:
    axes = axes_of(STAIRS)
    one, two, limit = axes.lines
    assert list(one.get_xdata()) == [0, 4, 30] and list(one.get_ydata()) == [5, 9, 1]
    assert list(two.get_ydata()) == [4, 2] and list(limit.get_ydata()) == [8, 8]
    assert axes.get_xlim() == (0, 10) and axes.get_ylabel() == "m (GB)"


@pytest.mark.parametrize(("x", "whole"), [([1.0, 2.0, 3.0], True), ([0.1, 0.2, 0.9], False)])
def test_steps_have_whole_numbers(x: list[float], whole: bool) -> None:
    chart = Chart(kind="lines", title="t", x_label="x", y_label="y", x=x, series={"a": x})
    axes = axes_of(chart)
    inside = [tick for tick in axes.get_xticks() if x[0] <= tick <= x[-1]]
    assert all(float(tick).is_integer() for tick in inside) == whole
    stairs = axes_of(dataclasses.replace(STAIRS, x_end=2.5))
    assert not all(float(tick).is_integer() for tick in stairs.get_xticks())


def test_a_layout_that_differs_in_its_last_bits_is_the_same_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    laid_out = Figure.draw_without_rendering
    for name, off in (("one", 0.0), ("two", 1e-13)):

        def jittered(figure: Figure, off: float = off) -> None:
            laid_out(figure)
            for axes in figure.axes:
                axes.set_position([place + off for place in axes.get_position().bounds])

        monkeypatch.setattr(Figure, "draw_without_rendering", jittered)
        figure = Figure(layout="constrained")
        draw(figure.add_subplot(), STAIRS)
        save(figure, str(tmp_path / f"{name}.svg"))
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_values_are_one_a_place() -> None:
    with pytest.raises(AssertionError):
        Chart(kind="stairs", title="", x_label="", y_label="", series={"a": [1.0]}, own_x={"a": []})


def seen(folder: Path, chart: Chart, x: float) -> dict[str, Any]:
    """Tips and shapes of a chart on a page."""
    path = folder / "page.html"
    write_page(path, "a page", '<div id="c"></div>', {"charts": {"c": [on_page(chart)]}})
    return seen_on(path, [(x, 5)])


@needs_node
def test_stairs_of_a_page_reach_the_end_of_the_axis(tmp_path: Path) -> None:
    found = seen(tmp_path, STAIRS, 76 + 970 / 2)
    lines = [shape["points"] for name, shape, _ in found["shapes"] if name == "polyline"]
    one, two = ([tuple(map(float, p.split(","))) for p in line.split()] for line in lines)
    left, width = 76, 970
    assert [x for x, _ in one] == pytest.approx(
        [left, left + 0.4 * width] + [left + 0.4 * width] + [left + width]
    )
    assert one[-1][1] == one[-2][1]  # the last value that is in sight
    assert [x for x, _ in two] == pytest.approx([left, left + 0.3 * width, left + 0.3 * width])
    assert "has: 8.00 GB" in [text for _, _, text in found["shapes"]]
    assert found["tips"] == ["t: 5 s\none: 9.00 GB\ntwo: -"]


@needs_node
def test_piles_of_a_page_are_cut_and_name_their_parts(tmp_path: Path) -> None:
    found = seen(tmp_path, PILES, 561)
    widths = [shape["width"] for name, shape, _ in found["shapes"] if name == "rect"]
    assert widths[0] / widths[2] == pytest.approx(5) and widths[2] / widths[3] == pytest.approx(2)
    assert widths[1] == pytest.approx(widths[0] * 1.04)  # to a little beyond the end, 20 s
    strokes = [shape["d"] for name, shape, _ in found["shapes"] if name == "path"]
    tops = [stroke.split("L")[1].split(",")[1] for stroke in strokes]
    assert tops == ["6", "6"]  # both on the first row
    assert found["tips"][0] == "long: a\n10 s, 25.0 % of 40 s"

"""A report's page: the run's own figures, no network, no name that breaks it, few bytes."""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_hdp.planner.pipeline import Pipeline
from megatron_hdp.simulator.execution import Disturbance, Run, simulate
from megatron_hdp.simulator.report import COLUMNS, Subject, bars, cells, charts, write_report
from megatron_hdp.simulator.report.figures import headline
from tests.simulator.browser import array_of, data_of, foreign, needs_node, seen_on
from tests.simulator.report.runs import SUBJECT, run_of, run_without_a_mesh, setting_of

MOST_BYTES = 2_000_000


class Text(HTMLParser):
    """Rows of all tables, cell by cell, and every other text; tags and attributes beside."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] == ["script"]:
            return
        self.texts.append(data)
        if self.rows and self.rows[-1] and self.tags[-1] in ("td", "th"):
            self.rows[-1][-1] += data.strip()


def page_of(folder: Path, run: Run, subject: Subject = SUBJECT) -> str:
    write_report(run, subject, str(folder / "report.html"))
    assert [file.name for file in folder.iterdir()] == ["report.html"]
    return (folder / "report.html").read_text(encoding="utf-8")


def charts_of(page: str) -> dict[str, Any]:
    """Charts of a page by title."""
    lists = data_of(page)["charts"].values()
    return {chart["title"]: chart for charts in lists for chart in charts}


def test_it_holds_the_figures_of_the_run(tmp_path: Path) -> None:
    run = run_of("naive", "auto", steps=3)
    page = page_of(tmp_path, run)
    figures = data_of(page)["figures"]
    assert list(figures) == list(run.outcomes)
    for name in run.outcomes:
        expected = run.figures(name)
        del expected["steps"]
        assert figures[name] == expected
    rows = Text(page).rows
    first = rows.index(list(COLUMNS))
    assert rows[first + 1 : first + 4] == [list(cells(run, name)) for name in run.outcomes]
    assert f"<h1>{headline(run)}</h1>" in page


def test_parts_add_up_to_the_step_times(tmp_path: Path) -> None:
    run = run_of("naive", "auto", steps=3)
    found = charts_of(page_of(tmp_path, run))
    parts, steps = found["Where the time of a step goes"], found["Step times"]
    sums = np.sum(list(parts["series"].values()), axis=0)
    for name, total in zip(parts["x"], sums, strict=True):
        assert total == pytest.approx(np.mean(steps["series"][name]))
        assert steps["series"][name] == [one.step_s for one in run.outcomes[name].steps]


def test_curves_are_those_of_the_first_step(tmp_path: Path) -> None:
    run = run_of("auto")
    found = charts_of(page_of(tmp_path, run))
    memory, computing = found["Memory of the fullest GPU"], found["Who computes"]
    assert memory["limits"] == {"a GPU has": 80e9}
    for name, outcome in run.outcomes.items():
        first = outcome.first
        assert first is not None and first.memory is not None
        assert max(memory["series"][name]) == first.memory.peak_bytes
        assert memory["own_x"][name][-1] == computing["own_x"][name][-1] == first.step_s
        worked = np.dot(computing["series"][name][:-1], np.diff(computing["own_x"][name]))
        assert worked == pytest.approx(first.busy_s.mean(), rel=1e-4)


def test_bars_are_those_of_the_first_step(tmp_path: Path) -> None:
    run = run_of("auto", pipeline=Pipeline(2, 2), job=None)
    for found in data_of(page_of(tmp_path, run))["bars"]["gantts"]:
        first = run.outcomes[found["name"]].first
        assert first is not None
        expected = bars.gantt_of(first, run.setting.disturbance.slow)
        np.testing.assert_array_equal(array_of(found["arrays"], "start_s"), expected.start_s)
        np.testing.assert_array_equal(array_of(found["arrays"], "busy_s"), expected.busy_s)
        np.testing.assert_array_equal(array_of(found["arrays"], "row"), expected.row)
        np.testing.assert_array_equal(array_of(found["arrays"], "chunk"), expected.chunk)
        assert (found["stages"], found["chunks"], expected.chunk.max()) == (2, 2, 1)
        assert (found["step"], found["ranks"]) == (first.step_s, list(expected.ranks))


def test_nothing_comes_from_elsewhere(tmp_path: Path) -> None:
    page = page_of(tmp_path, run_of("auto"))
    assert foreign(page) == []
    planted = page.replace("<main>", '<main><script src="https://x.org/plot.js"></script>')
    assert foreign(planted) == ["src=", "https://"]


def test_names_are_only_text(tmp_path: Path) -> None:
    name = "</script><img src=x onerror=alert(1)>&amp;\"'"
    subject = Subject(config=name, data=name, cost_model=name)
    text = Text(page_of(tmp_path, run_of("auto", steps=1), subject))
    assert text.tags.count("script") == 2 and "img" not in text.tags
    assert "onerror" not in dict(text.attributes)
    assert any(name in one for one in text.texts)


def test_a_strategy_without_a_plan_shows_its_reason(tmp_path: Path) -> None:
    run = run_without_a_mesh()
    page = page_of(tmp_path, run)
    reason = run.outcomes["dynamic-cp"].reason
    assert reason and any(reason in text for text in Text(page).texts)
    assert ["dynamic-cp", *["-"] * 7] in Text(page).rows
    assert "dynamic-cp" not in [one["name"] for one in data_of(page)["bars"]["gantts"]]
    assert "dynamic-cp" in data_of(page)["figures"]


@pytest.mark.slow
def test_many_ranks_and_steps_make_no_long_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(charts, "MAX_STEPS", 3)
    slow = dict.fromkeys(range(0, 4096, 2), 0.9)
    changes: dict[str, Any] = {"ranks": 4096, "max_length": 2**21, "job": None}
    run = run_of("naive", "auto", steps=5, disturbance=Disturbance(slow=slow), **changes)
    page = page_of(tmp_path, run)
    assert len(page) < MOST_BYTES / 4
    assert re.search("of 4,096 ranks; shown are 2[0-4],", page)
    assert "3 of 5 steps, evenly spaced." in page and "of the first of 5 steps" in page
    assert "and 2,032 more" in page  # slow ranks
    most = 7 * bars.MAX_BARS * 60  # seven strategies, all bars that may be, as text
    assert most < MOST_BYTES


@pytest.mark.slow
def test_sixteen_thousand_ranks(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"ranks": 16384, "max_length": 2**21, "job": None}
    run = run_of("naive", "bytescale", "auto", steps=1, pipeline=Pipeline(8), **changes)
    assert len(page_of(tmp_path, run)) < MOST_BYTES


@pytest.mark.parametrize(
    "suffix",
    ["html", *(pytest.param(one, marks=pytest.mark.slow) for one in ("svg", "png", "pdf"))],
)
def test_the_same_bytes_every_time(tmp_path: Path, suffix: str) -> None:
    paths = [tmp_path / f"{name}.{suffix}" for name in ("one", "two", "other")]
    for path, strategy in zip(paths, ("auto", "auto", "naive"), strict=True):
        write_report(run_of(strategy), SUBJECT, str(path))
    one, two, other = (path.read_bytes() for path in paths)
    assert one == two != other
    assert one[:4] == {"html": b"<!do", "png": b"\x89PNG", "svg": b"<?xm", "pdf": b"%PDF"}[suffix]


@pytest.mark.parametrize("suffix", ["html", "png"])
def test_a_report_of_nothing(tmp_path: Path, suffix: str) -> None:
    run = simulate(setting_of(), [np.array([10**6])], ["auto"])
    assert not any(one.steps for one in run.outcomes.values())
    write_report(run, SUBJECT, str(tmp_path / f"r.{suffix}"))
    assert (tmp_path / f"r.{suffix}").stat().st_size > 1000


@needs_node
def test_the_page_draws_and_answers(tmp_path: Path) -> None:
    run = run_of("auto", disturbance=Disturbance())
    data = data_of(page_of(tmp_path, run))
    keys = ["ArrowRight", "ArrowRight", "ArrowDown", "a"]
    seen = seen_on(tmp_path / "report.html", [(78, 4), (1059, 4)], keys)
    drawn, ours = data["bars"], data["bars"]["gantts"][-1]
    assert ours["name"] == "auto"
    width = 1060 - 76 - 14
    work = array_of(ours["arrays"], "busy_s").sum() / drawn["window"] * width
    painted = sum(seen["painted"].get(colour, 0.0) for colour in drawn["colours"])
    assert painted == pytest.approx(work, rel=0.01)
    waiting = seen["painted"]["--idle"]
    assert waiting == pytest.approx(16 * ours["makespan"] / drawn["window"] * width, rel=0.01)
    (parts,) = data["charts"]["parts"]
    widths = [shape["width"] for name, shape, _ in seen["shapes"] if name == "rect"]
    values = [one[k] for k in range(len(parts["x"])) for one in parts["series"].values()]
    np.testing.assert_allclose(np.array(widths) / sum(widths), np.array(values) / sum(values))
    assert seen["tips"][0].startswith("auto, rank 0\nmicro-batch ")
    assert seen["tips"][1] == ""  # after the end of the step
    first, second, below, other = seen["spoken"]
    assert "rank 0" in first and "rank 0" in second and first != second
    assert "rank 1\n" in below and other == below
    assert len(seen["labels"]) == 2 and "16 ranks" in seen["labels"][0]

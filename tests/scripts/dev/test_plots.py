"""Pictures of the docs are drawn, all of them, and show what their pages and numbers say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_hdp.simulator.trace_events import write_events
from megatron_hdp.training.step_trace import name_events, step_events
from tests.support.scripts import SCRIPTS, script_module
from tests.training.test_trace import ranks_of_two_machines, with_copies

ROOT = Path(__file__).parents[3]
PAGES = ("concepts", "data-plane", "long-sequences", "multimodal")
README = (ROOT / "README.md").read_text()
CONCEPTS, PLANE, LONG, MEDIA = ((ROOT / "docs" / f"{page}.md").read_text() for page in PAGES)


@pytest.fixture(scope="module")
def script():
    with script_module("dev/plot_docs.py") as module:
        yield module


def test_the_pages_show_every_picture(script):
    link = r"\]\((?:docs/)?([\w-]+\.(?:svg|png))\)"
    measured = {"trace-offload.png"}
    shown = set(re.findall(link, README + CONCEPTS + PLANE + LONG + MEDIA)) - measured
    assert shown == script.PICTURES.keys()
    assert all((ROOT / "docs" / name).exists() for name in shown)


@pytest.mark.slow  # most of them are drawn below
def test_every_picture_is_drawn(script, tmp_path):
    script.main(str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == script.PICTURES.keys()


@pytest.mark.parametrize("name", ["mesh", "pipelines"])
def test_the_page_says_the_times_of_the_picture(script, name):
    titles = [axes.get_title(loc="left") for axes in script.PICTURES[f"concept-{name}.svg"]().axes]
    mesh, hdp = (float(re.search(r": (.*) s,", title)[1]) for title in titles)
    assert hdp < mesh
    told = f"{mesh:.2f} s on the mesh, {hdp:.2f} s under HDP](concept-{name}.svg)"
    assert told in CONCEPTS


def test_the_page_says_the_times_of_both_waves(script):
    titles = [axes.get_title(loc="left") for axes in script.parts().axes]
    whole, parts = (float(re.search(r": (.*) s,", title)[1]) for title in titles)
    assert f"{whole:.2f} s whole, {parts:.2f} s in parts](long-parts.svg)" in LONG


def test_the_page_says_the_times_of_steps_with_pictures(script):
    titles = [axes.get_title(loc="left") for axes in script.items().axes]
    found = [re.fullmatch(r"(.*): (.*) s, (.*) times a step of text alone", one) for one in titles]
    home, outside, inside = (float(one[3]) for one in found)
    assert 1 <= inside < outside < home
    told = ", ".join(f"{one[1]} {one[2]} s" for one in found)
    assert f"{told}](media-step.svg)" in MEDIA


def test_the_readme_says_the_figures_of_its_picture(script):
    mesh, hdp = (axes.get_title(loc="left") for axes in script.readme().axes)
    assert f"The {mesh.replace('DP x CP ', '')}; {hdp}](docs/mesh-and-hdp.png)" in README


@pytest.mark.parametrize(("layers", "ratio"), [(6, 0.5), (6, 0), (8, 1), (3, 0.25)])
def test_what_stays_on_the_device_is_equation_3(script, layers, ratio):
    moments, held = script.resident(layers, ratio)
    assert max(held) == pytest.approx(2 + (1 - ratio) * (layers - 2))
    assert held[0] == held[-1] == 0
    assert moments[held.index(max(held))] == pytest.approx(layers)


def test_the_picture_has_the_roles_of_the_table(script):
    texts = {text.get_text().split("\n")[0] for text in script.roles().axes[0].texts}
    assert set(script.ROLES) <= texts
    part = PLANE.split("## Who does what")[1].split("A step's way")[0]
    told = set(re.findall(r"^\| ([a-z ]+) \| (?!how many)", part, re.MULTILINE))
    assert told == set(script.ROLES)


def test_virtual_stages_are_faster_in_the_picture(script):
    axes = script.PICTURES["pipeline-virtual.png"]().axes
    titles = [one.get_title(loc="left") for one in axes]
    assert [one.split(" on each stage")[0] for one in titles] == ["1 part", "5 virtual stages"]
    plain, virtual = (float(re.search(r": (.*) s,", title)[1]) for title in titles)
    assert virtual < 0.95 * plain


def test_every_shown_stage_has_its_work(script):
    one = script.planned(5, "byted")
    assert one.times.model_chunks == 5
    (axes,) = script.waves([one]).axes
    assert axes.get_ylim() == (2 * script.SHOWN - 0.5, -0.5)
    assert len(axes.get_yticks()) == script.SHOWN
    drawn = sum(len(one.get_paths()) for one in axes.collections)
    ranks = [int(label.get_text()) for label in axes.get_yticklabels()]
    passes = 2 * 2 * 5 * sum(len(one.plan.micro_batches_of(rank)) for rank in ranks)
    assert drawn == passes + 2 * script.SHOWN


def test_a_traced_step_is_drawn_and_another_is_refused(tmp_path):
    plan, evaluation, ranks = ranks_of_two_machines()
    events = [
        *name_events([rank.place for rank in ranks], offload=True),
        *step_events(ranks, plan, evaluation, 7, 0.0),
        *step_events(with_copies(ranks), plan, evaluation, 8, 10.0),
    ]
    trace, picture = tmp_path / "trace.json", tmp_path / "trace.png"
    write_events(trace, events, {})
    with (
        script_module("dev/plot_trace.py") as drawing,
        pytest.raises(ValueError, match=r"has the steps \[7, 8\], not 9"),
    ):
        drawing.main(str(trace), str(picture), "9")
    assert not picture.exists()
    command = [sys.executable, SCRIPTS / "dev" / "plot_trace.py", trace, picture, "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=570)
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")

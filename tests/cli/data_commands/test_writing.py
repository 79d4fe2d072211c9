"""Pictures and pages of charts: a page draws by itself, and nothing comes from elsewhere."""

import json
import re
import shutil
import subprocess
import sys

import pytest

from megatron_hdp.cli.data_commands.writing import write_charts
from megatron_hdp.simulator.charts import Chart

CHARTS = [
    Chart(
        kind="bars",
        title="bars",
        x_label="x",
        y_label="y",
        x=["one", "two"],
        series={"a": [1.0, 2.0], "b": [0.5, 4.0]},
    ),
    Chart(
        kind="stacked",
        title="areas",
        x_label="step",
        y_label="share",
        x=[0.0, 1.0, 4.0],
        series={"a": [0.25, 0.5, 1.0], "b": [0.75, 0.5, 0.0]},
        marks=[1.0],
    ),
    Chart(
        kind="lines",
        title="lines",
        x_label="step",
        y_label="tokens",
        x=[0.0, 1.0, 4.0],
        series={"longest": [8.0, 16.0, 64.0]},
        log=True,
    ),
]

BROWSER = """
const page = require("fs").readFileSync(process.argv[1], "utf8");
const data = page.match(/<script id="data"[^>]*>([^]*?)<\\/script>/)[1];
const code = page.match(/<script>\\n([^]*?)<\\/script>/)[1];
const made = [];
const element = (name) => {
  const one = { name, style: {}, kids: [], attributes: {}, on: {}, offsetWidth: 10,
    setAttribute(key, value) { one.attributes[key] = value; },
    appendChild(kid) { one.kids.push(kid); return kid; }, append() {},
    addEventListener(what, act) { one.on[what] = act; },
    getBoundingClientRect: () => ({ left: 0, width: 1060 }) };
  made.push(one);
  return one;
};
const found = { data: { textContent: data } };
for (const id of ["title", "text", "charts", "tip"]) found[id] = element(id);
const document = { getElementById: (id) => found[id], createElement: element,
  createElementNS: (space, name) => element(name) };
new Function("document", "innerWidth", code)(document, 1100);
const tips = made.filter((one) => one.name === "svg").map((one) => {
  one.on.mousemove({ clientX: 1040, clientY: 5 });
  return found.tip.textContent;
});
const shapes = made.filter((one) => ["rect", "polygon", "polyline"].includes(one.name));
console.log(JSON.stringify({ tips, text: found.text.textContent,
  shapes: shapes.map((one) => [one.name, one.attributes]) }));
"""


def page_of(path, title="a title", text="some text"):
    write_charts(str(path), title, CHARTS, text)
    return path.read_text()


def test_nothing_comes_from_elsewhere(tmp_path):
    page = page_of(tmp_path / "page.html").replace("http://www.w3.org/2000/svg", "")  # a name
    assert re.findall(r"(?:src|href)=|https?://|@import|fetch\(", page) == []


def test_words_are_only_text(tmp_path):
    title = "</script><script>alert(1)</script>"
    page = page_of(tmp_path / "page.html", title=title, text=title)
    assert page.count("</script>") == 2


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node on the PATH")
def test_the_page_draws_and_answers(tmp_path):
    page_of(tmp_path / "page.html")
    command = ["node", "-e", BROWSER, str(tmp_path / "page.html")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["text"] == "some text"
    names = [name for name, _ in seen["shapes"]]
    assert names == ["rect"] * 4 + ["polygon"] * 2 + ["polyline"]
    heights = [one["height"] for name, one in seen["shapes"] if name == "rect"]
    assert [height / heights[0] for height in heights] == pytest.approx([1, 2, 0.5, 4])
    (line,) = (one["points"] for name, one in seen["shapes"] if name == "polyline")
    places = [tuple(map(float, point.split(","))) for point in line.split()]
    (x0, y0), (x1, y1), (x2, y2) = places
    assert (x2 - x0) / (x1 - x0) == pytest.approx(4)
    assert (y0 - y2) / (y0 - y1) == pytest.approx(3)  # 8, 16, 64: one power of two, then two more
    lower, upper = (one["points"].split() for name, one in seen["shapes"] if name == "polygon")
    assert lower[:3] == upper[:2:-1]  # the upper area stands on the lower one
    assert seen["tips"][0] == "x: two\na: 2\nb: 4"
    assert seen["tips"][1] == "step: 4\na: 1\nb: 0"


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_pictures(tmp_path, suffix):
    write_charts(str(tmp_path / f"p.{suffix}"), "a title", CHARTS, "")
    raw = (tmp_path / f"p.{suffix}").read_bytes()
    assert {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix] == raw[
        : 5 if suffix == "svg" else 4
    ]


def test_a_picture_needs_matplotlib(tmp_path):
    script = f"""
import sys
class Missing:
    def find_spec(self, name, path, target=None):
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
sys.meta_path.insert(0, Missing())
from megatron_hdp.cli.data_commands.writing import write_charts
write_charts({str(tmp_path / "p.html")!r}, "a title", [], "")
write_charts({str(tmp_path / "p.png")!r}, "a title", [], "")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].endswith(
        "pip install 'megatron-hdp[plot]', or write a page (.html)"
    )
    assert [file.name for file in tmp_path.iterdir()] == ["p.html"]

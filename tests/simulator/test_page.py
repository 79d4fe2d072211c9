"""A page holds the whole plan, needs no network and cannot be broken by a title."""

import base64
import json
import os
import re
import shutil
import subprocess

import numpy as np
import pytest

from megatron_hdp.planner import evaluate
from megatron_hdp.simulator.lanes import lanes_of
from megatron_hdp.simulator.page import write_page
from tests.simulator.test_lanes import COST, TWO_STAGES, plan_of

KINDS = {"i": "<i4", "d": "<f8", "b": "u1"}


def made_plan():
    return plan_of([48, 12, 30], TWO_STAGES, num_ranks=2)


def page_of(folder, stages=1, **options):
    made = made_plan()
    write_page(made, evaluate(made, COST, stages), folder / "plan.html", **options)
    assert os.listdir(folder) == ["plan.html"]
    return (folder / "plan.html").read_text(encoding="utf-8")


def data_of(page):
    found = re.search(r'<script id="plan" type="application/json">(.*?)</script>', page, re.S)
    return json.loads(found[1])


def array_of(data, name):
    kind, text = data["arrays"][name]
    return np.frombuffer(base64.b64decode(text), dtype=KINDS[kind])


def test_the_page_holds_the_plan(tmp_path):
    made = made_plan()
    evaluation = evaluate(made, COST)
    data = data_of(page_of(tmp_path))
    lanes = lanes_of(made, evaluation)
    for name, expected in {
        "row": lanes.rank,
        "microBatch": lanes.micro_batch,
        "start": lanes.start_s,
        "ringEnd": lanes.ring_end_s,
        "ownEnd": lanes.own_end_s,
        "ranks": made.ranks,
        "rankOffsets": made.rank_offsets,
        "sequences": made.sequences,
        "sequenceOffsets": made.sequence_offsets,
        "localOffsets": made.local_offsets,
        "localSequences": made.local_sequences,
        "localRanks": made.local_ranks,
        "lengths": made.lengths,
        "offload": made.offload_ratios,
    }.items():
        np.testing.assert_array_equal(array_of(data, name), expected, err_msg=name)
    assert data["makespan"] == evaluation.makespan_s
    assert data["bound"] == evaluation.lower_bound_s
    assert (data["numRows"], data["pipelined"]) == (2, False)
    assert data["groupNames"] == ["degree 1", "degree 2"]


def test_a_pipelines_page_has_a_row_a_stage(tmp_path):
    data = data_of(page_of(tmp_path, stages=3))
    assert (data["numRows"], data["stagesARank"], data["pipelined"]) == (6, 3, True)
    assert set(array_of(data, "row").tolist()) == set(range(6))
    assert array_of(data, "backward").mean() == 0.5


def test_nothing_comes_from_elsewhere(tmp_path):
    page = page_of(tmp_path)
    assert re.findall(r"(?:src|href)=|https?://|@import|fetch\(", page) == []


def test_a_title_is_only_text(tmp_path):
    title = "</script><script>alert(1)</script> & \u2028"
    page = page_of(tmp_path, title=title)
    assert page.count("</script>") == 2
    assert data_of(page)["title"] == title


BROWSER = """
const page = require("fs").readFileSync(process.argv[1], "utf8");
const data = page.match(/<script id="plan"[^>]*>([^]*?)<\\/script>/)[1];
const code = page.match(/<script>\\n([^]*?)<\\/script>/)[1];
const on = {}, painted = {};
const pen = new Proxy({}, {
  get: (has, name) => name in has ? has[name] : (...size) => {
    if (name === "fillRect") painted[has.fillStyle] = (painted[has.fillStyle] || 0) + size[2];
  },
});
const element = () => ({ style: {}, kids: [], classList: { toggle() {} },
  append(...kids) { this.kids.push(...kids); }, addEventListener() {} });
const found = { plan: { textContent: data }, title: element(), legend: element(), tip: element(),
  canvas: { getContext: () => pen, setPointerCapture() {},
    addEventListener: (name, act) => { on[name] = act; },
    getBoundingClientRect: () => ({ width: 1000, height: 400 }) } };
const document = { getElementById: (id) => found[id], createElement: element };
new Function("document", "window", code)(document, { addEventListener() {} });
const whole = { ...painted };
const at = { offsetX: 800, offsetY: 300, preventDefault() {}, pointerId: 1 };
on.pointermove(at);
const tip = found.tip.textContent;
on.wheel({ ...at, deltaY: -500 }); on.wheel({ ...at, deltaY: -500, shiftKey: true });
on.pointerdown(at); on.pointermove({ ...at, offsetX: 700 }); on.pointerup(at);
on.dblclick(at); on.pointerleave(at);
console.log(JSON.stringify({ painted: whole, tip, legend: found.legend.kids.length }));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node on the PATH")
def test_the_page_draws_and_answers(tmp_path):
    page_of(tmp_path)
    data = data_of((tmp_path / "plan.html").read_text())
    command = ["node", "-e", BROWSER, str(tmp_path / "plan.html")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    one, two = data["colours"]["full"]
    # 24 s of ring on both ranks, then 12 s of local and 30 s of one rank on rank 1
    assert seen["painted"][two] == pytest.approx(2 * 24 / 30 * seen["painted"][one], rel=0.01)
    local = data["colours"]["local"]
    assert seen["painted"][local] == pytest.approx(12 / 30 * seen["painted"][one], rel=0.01)
    assert seen["tip"].startswith("micro-batch 1 on rank 1\n1 rank: 1\n1 sequence: 2\n30 tokens")
    assert seen["legend"] == 6  # two degrees, local, idle, makespan, bound

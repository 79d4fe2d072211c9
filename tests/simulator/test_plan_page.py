"""A plan's page holds the whole plan, needs no network and cannot be broken by a title."""

import os

import numpy as np
import pytest

from megatron_hdp.planner import evaluate
from megatron_hdp.simulator.plan_bars import lanes_of
from megatron_hdp.simulator.plan_page import write_plan_page
from tests.simulator.browser import array_of, data_of, foreign, needs_node, seen_on
from tests.simulator.test_plan_bars import COST, TWO_STAGES, plan_of


def made_plan():
    return plan_of([48, 12, 30], TWO_STAGES, num_ranks=2)


def page_of(folder, stages=1, **options):
    made = made_plan()
    write_plan_page(made, evaluate(made, COST, stages), folder / "plan.html", **options)
    assert os.listdir(folder) == ["plan.html"]
    return (folder / "plan.html").read_text(encoding="utf-8")


def test_the_page_holds_the_plan(tmp_path):
    made = made_plan()
    evaluation = evaluate(made, COST)
    (gantt,) = data_of(page_of(tmp_path))["bars"]["gantts"]
    lanes = lanes_of(made, evaluation)
    order = np.lexsort((lanes.start_s, lanes.rank))
    for name, expected in {
        "row": lanes.rank,
        "micro_batch": lanes.micro_batch,
        "degree": lanes.degree,
        "start_s": lanes.start_s,
        "busy_s": lanes.ring_end_s - lanes.start_s,
        "end_s": lanes.own_end_s,
    }.items():
        np.testing.assert_array_equal(array_of(gantt["arrays"], name), expected[order])
    assert len(gantt["plan"]) == 9
    for name in gantt["plan"]:
        expected = getattr(made, name)
        np.testing.assert_array_equal(array_of(gantt["plan"], name), expected, err_msg=name)
    assert gantt["makespan"] == evaluation.makespan_s
    assert [limit[0] for limit in gantt["limits"]] == [
        evaluation.makespan_s,
        evaluation.lower_bound_s,
    ]
    assert (gantt["rows"], gantt["stages"]) == (2, 1)


def test_a_pipelines_page_has_a_row_a_stage(tmp_path):
    (gantt,) = data_of(page_of(tmp_path, stages=3))["bars"]["gantts"]
    assert (gantt["rows"], gantt["stages"]) == (6, 3)
    assert set(array_of(gantt["arrays"], "row").tolist()) == set(range(6))
    assert array_of(gantt["arrays"], "backward").mean() == 0.5


def test_a_title_is_only_text_and_nothing_comes_from_elsewhere(tmp_path):
    page = page_of(tmp_path, title="</script><script>alert(1)</script> & \u2028")
    assert page.count("</script>") == 2
    assert foreign(page) == []


@needs_node
def test_the_page_draws_and_answers(tmp_path):
    bars = data_of(page_of(tmp_path))["bars"]
    seen = seen_on(tmp_path / "plan.html", [(900, 30)])
    one, two = bars["colours"]
    # 24 s of ring on both ranks, then 12 s of local and 30 s of one rank on rank 1
    assert seen["painted"][two] == pytest.approx(2 * 24 / 30 * seen["painted"][one], rel=0.01)
    local = bars["local"]
    assert seen["painted"][local] == pytest.approx(12 / 30 * seen["painted"][one], rel=0.01)
    (tip,) = seen["tips"]
    assert tip.startswith("rank 1\nmicro-batch 1\nring of 1 rank: 1\n1 sequence, 30 tokens: 2\n")
    assert len(seen["legend"]) == 6  # two degrees, local, idle, makespan, bound
    assert seen["buttons"] == ["false", "false"]  # degrees, hidden by a click each

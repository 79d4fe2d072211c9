"""Bars and shares of a step add up to the work that its execution says."""

import numpy as np
import pytest

from megatron_hdp.planner.pipeline import Pipeline
from megatron_hdp.simulator.execution import Disturbance, StepExecution
from megatron_hdp.simulator.report import bars
from tests.simulator.report.runs import run_of


def step_of(strategy: str = "auto", **changes: object) -> StepExecution:
    first = run_of(strategy, steps=1, **{"job": None, **changes}).outcomes[strategy].first
    assert first is not None
    return first


PIPELINES = [Pipeline(), Pipeline(3), Pipeline(2, 2), Pipeline(2, 2, (1, 2, 3, 0))]


@pytest.mark.parametrize("pipeline", PIPELINES, ids=str)
@pytest.mark.parametrize("strategy", ["static", "naive", "auto"])
def test_bars_are_the_work_of_each_rank(strategy: str, pipeline: Pipeline) -> None:
    step, stages = step_of(strategy, pipeline=pipeline), pipeline.stages
    gantt = bars.gantt_of(step)
    assert gantt.ranks == tuple(range(8 if stages == 3 else 16)) or len(gantt.ranks) <= 16
    for row in range(len(gantt.ranks) * stages):
        mine = np.flatnonzero(gantt.row == row)
        rank, weight = gantt.ranks[row // stages], pipeline.stage_weights[row % stages]
        assert gantt.busy_s[mine].sum() == pytest.approx(step.busy_s[rank] * stages * weight)
        assert set(gantt.chunk[mine]) == set(range(pipeline.chunks))
        assert np.all(gantt.start_s[mine][1:] >= gantt.end_s[mine][:-1] - 1e-9)
    assert gantt.end_s.max() <= step.makespan_s * (1 + 1e-9)
    assert gantt.backward.any() == (stages > 1)


def test_parts_behind_the_last_backward_end_with_the_step() -> None:
    step = step_of()
    behind = bars.gantt_of(step).behind
    assert [name for name, _, _ in behind] == ["gradient sync", "optimizer", "parameter gather"]
    assert behind[0][1] == step.makespan_s
    for (_, at, length), (_, then, _) in zip(behind, behind[1:], strict=False):
        assert then == pytest.approx(at + length)
    assert behind[-1][1] + behind[-1][2] == pytest.approx(step.step_s)


@pytest.mark.parametrize("pipeline", PIPELINES, ids=str)
def test_the_share_that_computes_adds_up(pipeline: Pipeline) -> None:
    step = step_of(pipeline=pipeline)
    for edges in (np.linspace(0, step.step_s, 50), np.array([0, 0.1, 0.35, 1.0]) * step.step_s):
        share = bars.computing_share(step, edges)
        assert share.min() >= -1e-9 and share.max() <= 1 + 1e-9
        assert (share * np.diff(edges)).sum() == pytest.approx(step.busy_s.mean())


def test_few_of_many_ranks_are_shown_and_slow_ones_always() -> None:
    slow = {rank: 0.5 for rank in (17, 33, 34)}
    step = step_of(ranks=100, max_length=100 * 4096, disturbance=Disturbance(slow=slow))
    gantt = bars.gantt_of(step, slow)
    assert 4 <= len(gantt.ranks) <= bars.MAX_ROWS
    assert {17, 33, 34, 0, 99} <= set(gantt.ranks)
    assert {int(step.busy_s.argmax()), int(step.busy_s.argmin())} <= set(gantt.ranks)
    assert set(np.unique(gantt.row)) == set(range(len(gantt.ranks)))


@pytest.mark.parametrize("most", [72, 40])
def test_short_bars_are_joined_and_no_work_is_lost(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    step = step_of(strategy="naive")
    whole = bars.gantt_of(step)
    monkeypatch.setattr(bars, "MAX_BARS", most)
    joined = bars.gantt_of(step)
    assert len(joined.row) <= most < len(whole.row)
    assert joined.num_joined > 0 == whole.num_joined
    assert joined.joined.sum() == len(whole.row)
    assert joined.tokens.sum() == whole.tokens.sum()
    for row in range(16):
        expected = whole.busy_s[whole.row == row].sum()
        assert joined.busy_s[joined.row == row].sum() == pytest.approx(expected)

"""The interleaved schedule's times: against workers that block, and the ramp by hand."""

import numpy as np
import pytest
from hypothesis import given

from megatron_hdp.planner import evaluate, plan
from megatron_hdp.planner.evaluation import replay
from megatron_hdp.planner.lockstep import PADDING, slots
from megatron_hdp.planner.pipeline import Pipeline
from megatron_hdp.simulator.plan_bars import lanes_of
from tests.planner.blocking import run_blocking
from tests.planner.problems import COST_MODELS, agree, problems
from tests.planner.test_interleaved_execution import BATCH, made_of, slowly

INTERLEAVED = [
    *(Pipeline(2, 2), Pipeline(4, 2), Pipeline(2, 3)),
    *(Pipeline(2, 2, (1, 2, 0, 3)), Pipeline(3, 2, (0.5, 1, 1, 1, 1, 2))),
]
PLAIN = [Pipeline(2), Pipeline(3, 1, (2, 1, 0)), Pipeline(4, 1, (0, 2, 1, 1))]


@pytest.mark.parametrize("pipeline", INTERLEAVED, ids=str)
@slowly
@given(**BATCH)
def test_the_times_of_random_plans(pipeline, lengths, ranks, seed):
    made = made_of(lengths, ranks, seed)
    duration_s = np.random.default_rng(seed).uniform(1, 9, made.num_micro_batches)
    found = replay(made, duration_s, pipeline)
    lists = slots(made, aligned=True, group_size=pipeline.group_size)
    seconds = {
        (rank, place): duration_s[m]
        for rank, one in enumerate(lists)
        for place, m in enumerate(one.tolist())
        if m != PADDING
    }
    ran = run_blocking(lists, pipeline, seconds=seconds)
    assert found.makespan_s == pytest.approx(max(one.end_s for one in ran.values()))
    for (rank, kind, place, at), one in ran.items():
        if (rank, place) in seconds:
            of_pass = found.forward_start_s if kind == "F" else found.backward_start_s
            assert of_pass[at, lists[rank][place]] == pytest.approx(one.start_s)


@pytest.mark.parametrize("pipeline", [*PLAIN, *INTERLEAVED], ids=str)
@slowly
@given(problem=problems())
def test_the_planner_and_the_evaluator_agree(pipeline, problem):
    """And nothing is faster than the bound."""
    made = problem.plan(
        "pp-balance",
        pipeline_stages=pipeline.stages,
        virtual_stages=pipeline.chunks,
        stage_weights=pipeline.weights or None,
    )
    found = evaluate(made, problem.model, pipeline.stages, pipeline.chunks, pipeline.weights)
    agree(made, found)


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("stages", [2, 4])
def test_the_ramp_shrinks_by_the_chunks(stages, chunks):
    """Micro-batches of equal times t: M t / P of work, and (P - 1) / V of one at the ends."""
    made = plan([8] * 4 * stages, ranks=1, tokens_per_rank=8)
    found = replay(made, np.full(4 * stages, 6.0), Pipeline(stages, chunks))
    assert found.makespan_s == pytest.approx((4 * stages + (stages - 1) / chunks) * 6 / stages)


def test_lanes_hold_the_bars_of_every_chunk():
    made = plan([30, 30, 5, 5], ranks=2, tokens_per_rank=16, pipeline_stages=2)
    plain, virtual = (evaluate(made, COST_MODELS["record"], 2, chunks) for chunks in (1, 2))
    assert virtual.total_compute_s / 4 <= virtual.lower_bound_s <= virtual.makespan_s
    for stage in range(2):
        bars, of_chunks = lanes_of(made, plain, stage), lanes_of(made, virtual, stage)
        assert of_chunks.num_bars == 2 * bars.num_bars
        assert of_chunks.backward.sum() == of_chunks.num_bars // 2
        busy_s = (bars.own_end_s - bars.start_s).sum()
        assert (of_chunks.own_end_s - of_chunks.start_s).sum() == pytest.approx(busy_s)
        for rank in range(2):  # a rank does one thing at a time
            mine = of_chunks.rank == rank
            order = np.argsort(of_chunks.start_s[mine])
            starts_s, ends_s = of_chunks.start_s[mine][order], of_chunks.own_end_s[mine][order]
            assert (starts_s[1:] >= ends_s[:-1] - 1e-12).all()

"""Plans run by workers that block (`blocking`), and by threads: valid ones end, others do not."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hdp.planner import Plan, PlanError, evaluate, plan
from megatron_hdp.planner.pipeline import Pipeline
from tests.planner.blocking import fed_by, one_forward_one_backward, run_blocking
from tests.planner.problems import (
    COST_MODELS,
    EXECUTED_STRATEGIES,
    Problem,
    problems,
    repeatable,
    rings_of,
)

PIPELINE_STRATEGIES = ("static", "pp-balance")

slowly = repeatable(60)


def run_threads(plan: Plan, stages: int, patience_s: float) -> int:
    """How many operations end: a thread for each worker, a barrier for each ring."""
    rings = [plan.micro_batch(m).ranks for m in range(plan.num_micro_batches)]
    names = [(k, m, s) for k in "FB" for m in range(len(rings)) for s in range(stages)]
    barriers = {name: threading.Barrier(len(rings[name[1]])) for name in names}
    ended = {name: threading.Event() for name in names}

    def work(queue: list[int], stage: int) -> None:
        for kind, m, _ in one_forward_one_backward(queue, stage, stages):
            needed = fed_by(kind, m, stage, stages - 1)
            if needed is not None and not ended[needed].wait(patience_s):
                return
            try:
                barriers[kind, m, stage].wait(patience_s)
            except threading.BrokenBarrierError:
                return
            ended[kind, m, stage].set()

    threads = [
        threading.Thread(target=work, args=(queue, stage), daemon=True)
        for queue in queues_of(plan)
        for stage in range(stages)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(event.is_set() for event in ended.values())


def queues_of(plan: Plan) -> list[list[int]]:
    return [plan.micro_batches_of(rank).tolist() for rank in range(plan.num_ranks)]


def completes(plan: Plan, stages: int) -> bool:
    return run_blocking(queues_of(plan), Pipeline(stages)) is not None


def trap() -> Plan:
    """Runs with one stage; with two, each of the rings 0 and 3 waits for the other.

    Rank 1 runs both of its own micro-batches between the rings, so that 1F1B puts forward 3 behind
    backward 0 there and in front of it on rank 0.
    """
    return rings_of([[0, 1], [1], [1], [0, 1]], [4, 4, 4, 4])


@pytest.mark.parametrize("strategy", EXECUTED_STRATEGIES)
@slowly
@given(problem=problems())
def test_valid_plans_never_deadlock(strategy: str, problem: Problem) -> None:
    assert completes(problem.plan(strategy), 1)


@pytest.mark.parametrize("strategy", PIPELINE_STRATEGIES)
@slowly
@given(problem=problems(), stages=st.integers(2, 8))
def test_pipelines_never_deadlock(strategy: str, problem: Problem, stages: int) -> None:
    made = problem.plan(strategy, pipeline_stages=stages)
    made.validate(pipeline_stages=stages)
    assert completes(made, stages)


@slowly
@given(problem=problems(), stages=st.integers(2, 5))
def test_the_evaluator_reports_a_deadlock_where_workers_block(
    problem: Problem, stages: int
) -> None:
    made = problem.plan("naive")  # knows nothing of positions
    try:
        evaluate(made, problem.model, stages)
    except ValueError as error:
        assert "deadlock" in str(error)
        assert not completes(made, stages)
        with pytest.raises(PlanError):
            made.validate(pipeline_stages=stages)
    else:
        assert completes(made, stages)


@pytest.mark.parametrize("strategy", EXECUTED_STRATEGIES)
def test_an_order_that_one_rank_does_not_share_deadlocks(strategy: str) -> None:
    made = Problem((30, 30, 30), 3, 10, 1, "record").plan(strategy)
    queues = queues_of(made)
    assert queues[0] == queues[1] == [0, 1, 2]
    assert completes(made, 1)
    queues[0].reverse()
    assert run_blocking(queues, Pipeline()) is None


@pytest.mark.parametrize("stages", [2, 3, 8])
def test_different_positions_deadlock_only_in_pipelines(stages: int) -> None:
    made = trap()
    made.validate()
    assert completes(made, 1) and not completes(made, stages)
    with pytest.raises(PlanError, match="different positions"):
        made.validate(pipeline_stages=stages)
    with pytest.raises(ValueError, match=r"deadlock .* 0 \(ranks \[0, 1\]\), .*3 \(ranks"):
        evaluate(made, COST_MODELS["record"], stages)


def test_workers_and_threads_complete_a_mixed_batch() -> None:
    lengths = [90, 45, 40, 25, 12, 11, *[7] * 6, *[3] * 12]
    made = plan(lengths, ranks=6, tokens_per_rank=16, strategy="pp-balance", pipeline_stages=3)
    assert completes(made, 3)
    assert run_threads(made, 3, patience_s=60.0) == 2 * 3 * made.num_micro_batches


def test_threads_block_in_the_trap() -> None:
    assert run_threads(trap(), 2, patience_s=0.3) < 2 * 2 * 4

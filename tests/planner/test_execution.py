"""Runs plans with blocking semantics: a worker enters its next operation and waits for its ring.

A worker is one stage of one rank. It runs its own list, forwards and backwards in the order of
1F1B, and knows nothing of the others but what it waits for.
"""

import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hdp.planner import Plan, PlanError, evaluate, plan
from tests.planner.problems import (
    COST_MODELS,
    EXECUTED_STRATEGIES,
    Problem,
    problems,
    repeatable,
    rings_of,
)

PIPELINE_STRATEGIES = ("static", "pp-balance")

Operation = tuple[str, int]  # "F" or "B", micro-batch
Workers = dict[tuple[int, int], list[Operation]]  # by rank and stage

slowly = repeatable(60)


def one_forward_one_backward(micro_batches: list[int], stage: int, stages: int) -> list[Operation]:
    warm_up = min(len(micro_batches), stages - 1 - stage)
    steady = len(micro_batches) - warm_up
    operations = [("F", m) for m in micro_batches[:warm_up]]
    for i in range(steady):
        operations += [("F", micro_batches[warm_up + i]), ("B", micro_batches[i])]
    return operations + [("B", m) for m in micro_batches[steady:]]


def workers_of(queues: list[list[int]], stages: int) -> Workers:
    return {
        (rank, stage): one_forward_one_backward(queue, stage, stages)
        for rank, queue in enumerate(queues)
        for stage in range(stages)
    }


def fed_by(operation: Operation, stage: int, stages: int) -> tuple[str, int, int] | None:
    """The operation on another stage (or, on the last, of the other pass) that must end before."""
    kind, m = operation
    if kind == "F":
        return ("F", m, stage - 1) if stage else None
    return ("B", m, stage + 1) if stage + 1 < stages else ("F", m, stage)


def run_blocking(plan: Plan, workers: Workers, stages: int) -> int:
    """How many operations end, a ring's counted once; fewer than all: a deadlock."""
    waiting = {worker: list(operations) for worker, operations in workers.items()}
    rings = [plan.micro_batch(m).ranks for m in range(plan.num_micro_batches)]
    done: set[tuple[str, int, int]] = set()
    progress = True
    while progress:
        progress = False
        for (_, stage), operations in waiting.items():
            if not operations:
                continue
            operation = operations[0]
            members = [waiting[rank, stage] for rank in rings[operation[1]]]
            needed = fed_by(operation, stage, stages)
            if needed in done or needed is None:
                if not all(queue and queue[0] == operation for queue in members):
                    continue
                for queue in members:
                    queue.pop(0)
                done.add((*operation, stage))
                progress = True
    return len(done)


def run_threads(plan: Plan, workers: Workers, stages: int, patience_s: float) -> int:
    """The same with a thread for each worker, barriers as rings and events between stages."""
    rings = [plan.micro_batch(m).ranks for m in range(plan.num_micro_batches)]
    names = [(k, m, s) for k in "FB" for m in range(len(rings)) for s in range(stages)]
    barriers = {name: threading.Barrier(len(rings[name[1]])) for name in names}
    ended = {name: threading.Event() for name in names}

    def work(stage: int, operations: list[Operation]) -> None:
        for operation in operations:
            needed = fed_by(operation, stage, stages)
            if needed is not None and not ended[needed].wait(patience_s):
                return
            try:
                barriers[*operation, stage].wait(patience_s)
            except threading.BrokenBarrierError:
                return
            ended[*operation, stage].set()

    threads = [
        threading.Thread(target=work, args=(stage, operations), daemon=True)
        for (_, stage), operations in workers.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(event.is_set() for event in ended.values())


def queues_of(plan: Plan) -> list[list[int]]:
    return [plan.micro_batches_of(rank).tolist() for rank in range(plan.num_ranks)]


def num_operations(plan: Plan, stages: int) -> int:
    return 2 * stages * plan.num_micro_batches


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
    made = problem.plan(strategy)
    assert run_blocking(made, workers_of(queues_of(made), 1), 1) == num_operations(made, 1)


@pytest.mark.parametrize("strategy", PIPELINE_STRATEGIES)
@slowly
@given(problem=problems(), stages=st.integers(2, 8))
def test_pipelines_never_deadlock(strategy: str, problem: Problem, stages: int) -> None:
    made = problem.plan(strategy, pipeline_stages=stages)
    made.validate(pipeline_stages=stages)
    workers = workers_of(queues_of(made), stages)
    assert run_blocking(made, workers, stages) == num_operations(made, stages)


@slowly
@given(problem=problems(), stages=st.integers(2, 5))
def test_the_evaluator_reports_a_deadlock_where_workers_block(
    problem: Problem, stages: int
) -> None:
    made = problem.plan("naive")  # knows nothing of positions
    workers = workers_of(queues_of(made), stages)
    completes = run_blocking(made, workers, stages) == num_operations(made, stages)
    try:
        evaluate(made, problem.model, stages)
    except ValueError as error:
        assert "deadlock" in str(error)
        assert not completes
        with pytest.raises(PlanError):
            made.validate(pipeline_stages=stages)
    else:
        assert completes


@pytest.mark.parametrize("strategy", EXECUTED_STRATEGIES)
def test_an_order_that_one_rank_does_not_share_deadlocks(strategy: str) -> None:
    made = Problem((30, 30, 30), 3, 10, 1, "record").plan(strategy)
    queues = queues_of(made)
    assert queues[0] == queues[1] == [0, 1, 2]
    queues[0].reverse()
    assert run_blocking(made, workers_of(queues, 1), 1) == 0


@pytest.mark.parametrize("stages", [2, 3, 8])
def test_different_positions_deadlock_only_in_pipelines(stages: int) -> None:
    made = trap()
    made.validate()
    assert run_blocking(made, workers_of(queues_of(made), 1), 1) == num_operations(made, 1)
    with pytest.raises(PlanError, match="different positions"):
        made.validate(pipeline_stages=stages)
    workers = workers_of(queues_of(made), stages)
    assert run_blocking(made, workers, stages) < num_operations(made, stages)
    with pytest.raises(ValueError, match=r"deadlock .* 0 \(ranks \[0, 1\]\), .*3 \(ranks"):
        evaluate(made, COST_MODELS["record"], stages)


@pytest.mark.parametrize("run", [run_blocking, lambda *a: run_threads(*a, patience_s=60.0)])
def test_workers_complete_a_mixed_batch(run: Callable[[Plan, Workers, int], int]) -> None:
    lengths = [90, 45, 40, 25, 12, 11, *[7] * 6, *[3] * 12]
    made = plan(lengths, ranks=6, tokens_per_rank=16, strategy="pp-balance", pipeline_stages=3)
    assert run(made, workers_of(queues_of(made), 3), 3) == num_operations(made, 3)


def test_threads_block_in_the_trap() -> None:
    made = trap()
    ended = run_threads(made, workers_of(queues_of(made), 2), 2, patience_s=0.3)
    assert ended < num_operations(made, 2)

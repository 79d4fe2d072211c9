"""Runs plans with blocking semantics: a rank enters its next micro-batch and waits for its ring."""

import pytest
from hypothesis import HealthCheck, given, settings

from megatron_hdp.planner import Plan
from tests.planner.problems import EXECUTED_STRATEGIES, Problem, problems


def run_blocking(plan: Plan, queues: list[list[int]]) -> list[int]:
    """The micro-batches in the order in which they could start; fewer than all: a deadlock."""
    queues = [list(queue) for queue in queues]
    done = []
    progress = True
    while progress:
        progress = False
        for queue in queues:
            if not queue:
                continue
            m = queue[0]
            ring = plan.micro_batch(m).ranks
            if all(queues[rank] and queues[rank][0] == m for rank in ring):
                for rank in ring:
                    queues[rank].pop(0)
                done.append(m)
                progress = True
    return done


def queues_of(plan: Plan) -> list[list[int]]:
    return [plan.micro_batches_of(rank).tolist() for rank in range(plan.num_ranks)]


@pytest.mark.parametrize("strategy", EXECUTED_STRATEGIES)
@settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(problem=problems())
def test_valid_plans_never_deadlock(strategy: str, problem: Problem) -> None:
    plan = problem.plan(strategy)
    assert sorted(run_blocking(plan, queues_of(plan))) == list(range(plan.num_micro_batches))


@pytest.mark.parametrize("strategy", EXECUTED_STRATEGIES)
def test_an_order_that_one_rank_does_not_share_deadlocks(strategy: str) -> None:
    plan = Problem((30, 30, 30), 3, 10, 1, "record").plan(strategy)
    queues = queues_of(plan)
    assert queues[0] == queues[1] == [0, 1, 2]
    queues[0].reverse()
    assert run_blocking(plan, queues) == []

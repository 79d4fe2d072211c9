"""Ranks and stages that wait for each other, by hand."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hdp.planner.lockstep import PADDING, slots
from megatron_hdp.simulator.execution import Machine, StepExecution, execute
from tests.planner.problems import Problem, problems
from tests.simulator.execution.plans import COSTS, plan_of

HALF_A_SECOND = Machine(message_bytes_per_token=1.0, network_bytes_per_s=2.0)


def test_members_wait_for_each_other() -> None:
    # rank 0 runs 0 and then the ring; rank 1 only the ring, rank 2 nothing else than 2
    run = execute(plan_of([[0], [0, 1], [2]]), COSTS)
    assert run.forward_start_s.tolist() == [[0.0, 6.0, 0.0]]
    assert run.backward_start_s.tolist() == [[2.0, 8.0, 2.0]]
    assert run.end_s.tolist() == [[12.0, 12.0, 6.0]]
    assert run.busy_s.tolist() == [12.0, 6.0, 6.0]
    assert run.record.waiting_s == pytest.approx((0 + 6 + 6) / 3)
    assert run.record.bubble_share == pytest.approx(12 / 36)


def test_two_stages_run_one_forward_one_backward() -> None:
    run = execute(plan_of([[0], [0]]), COSTS, pipeline_stages=2)
    assert run.forward_start_s.tolist() == [[0.0, 1.0], [1.0, 4.0]]
    assert run.backward_start_s.tolist() == [[4.0, 7.0], [2.0, 5.0]]
    assert run.end_s.tolist() == [[9.0], [7.0]]


def test_messages_between_stages_take_their_time() -> None:
    run = execute(plan_of([[0], [0]]), COSTS, pipeline_stages=2, machine=HALF_A_SECOND)
    assert run.forward_start_s.tolist() == [[0.0, 1.0], [1.5, 4.5]]
    assert run.backward_start_s.tolist() == [[5.0, 8.0], [2.5, 5.5]]
    assert run.makespan_s == 10.0


def test_a_ring_joins_two_pipelines() -> None:
    # the ring is first on both; rank 0 runs two more
    run = execute(plan_of([[0, 1], [0], [0]]), COSTS, pipeline_stages=2)
    assert run.forward_start_s.tolist() == [[0.0, 1.0, 6.0], [1.0, 4.0, 7.0]]
    assert run.backward_start_s.tolist() == [[4.0, 7.0, 10.0], [2.0, 5.0, 8.0]]
    assert run.end_s.tolist() == [[12.0, 6.0], [10.0, 4.0]]


def test_padding_takes_a_position() -> None:
    # the ring is second on rank 0: rank 1 runs padding before it, as long as what holds nothing
    run = execute(plan_of([[0], [0, 1]]), COSTS, pipeline_stages=2)
    assert run.padding_ranks.tolist() == [1]
    assert run.forward_start_s.tolist() == [[0.0, 1.0, 0.0], [1.0, 4.0, 1.0]]
    assert run.busy_s.tolist() == [6.0, 3.0]  # padding is no work
    assert run.end_s.tolist() == [[9.0, 9.0], [7.0, 7.0]]


def test_ranks_in_lockstep_run_every_position_together() -> None:
    slow = plan_of([[0], [1], [0]], lengths=[100, 1, 1])
    costs = COSTS.__class__(a=0.0, b=0.06, kv_bytes_per_token=0.0)
    alone = execute(slow, costs)
    together = execute(slow, costs, lockstep_ranks=2)
    assert alone.end_s.tolist() == [[pytest.approx(6.06), pytest.approx(0.06)]]
    assert together.padding_ranks.tolist() == [1]
    assert together.end_s.tolist() == [[pytest.approx(6.06), pytest.approx(6.06)]]
    assert together.forward_s.tolist() == pytest.approx([2.0, 2.0, 0.02, 0.02])


def test_lockstep_reaches_through_rings() -> None:
    # 0 and 1 share experts, so do 2 and 3; the ring of 1 and 2 joins all four at position 0
    costs = COSTS.__class__(a=0.0, b=1.0, kv_bytes_per_token=0.0)
    run = execute(plan_of([[0], [1, 2], [3]], lengths=[9, 2, 3]), costs, lockstep_ranks=2)
    assert run.end_s.tolist() == [[9.0] * 4]


def slowly(run: StepExecution, lag_s: list[float]) -> dict[tuple[str, int, int], float]:
    """When each forward and backward starts: every stage of every rank has its list of Megatron's
    schedule, and what stands first on all of its ranks runs, once its message is there."""
    plan, stages = run.plan, run.pipeline_stages
    padding = iter(range(plan.num_micro_batches, len(run.forward_s)))
    members: dict[int, list[int]] = {}
    lists: dict[tuple[int, int], list[tuple[str, int]]] = {}
    for rank, own in enumerate(slots(plan, aligned=True)):
        named = [next(padding) if m == PADDING else m for m in own.tolist()]
        for m in named:
            members.setdefault(m, []).append(rank)
        for stage in range(stages):
            warm_up = min(stages - 1 - stage, len(named))
            order = [("F", m) for m in named[:warm_up]]
            for i in range(len(named) - warm_up):
                order += [("F", named[warm_up + i]), ("B", named[i])]
            order += [("B", m) for m in named[len(named) - warm_up :]]
            lists[rank, stage] = order
    seconds = {"F": run.forward_s, "B": run.backward_s}
    free = dict.fromkeys(lists, 0.0)
    starts: dict[tuple[str, int, int], float] = {}

    def arrival(kind: str, m: int, stage: int) -> float | None:
        """When what an operation needs is there; None as long as nobody made it."""
        if (kind, stage) == ("F", 0):
            return 0.0
        needs = ("F", m, stage - 1) if kind == "F" else ("B", m, stage + 1)
        if (kind, stage) == ("B", stages - 1):
            needs = ("F", m, stage)
        if needs not in starts:
            return None
        sent = needs[2] != stage
        return float(starts[needs] + seconds[needs[0]][m]) + (lag_s[m] if sent else 0.0)

    while any(lists.values()):
        before = len(starts)
        for (_, stage), order in lists.items():
            if not order:
                continue
            kind, m = order[0]
            places = [(rank, stage) for rank in members[m]]
            there = arrival(kind, m, stage)
            if there is None or any(lists[place][:1] != [(kind, m)] for place in places):
                continue
            starts[kind, m, stage] = max(there, *(free[place] for place in places))
            for place in places:
                free[place] = float(starts[kind, m, stage] + seconds[kind][m])
                lists[place].pop(0)
        assert len(starts) > before, "they wait for each other for ever"
    return starts


@settings(max_examples=25, deadline=None)
@given(problems(), st.sampled_from(["naive", "bytescale", "pp-balance"]), st.data())
def test_any_plan_on_pipelines(problem: Problem, strategy: str, data: Any) -> None:
    problem = dataclasses.replace(problem, lengths=problem.lengths[:12])
    stages = data.draw(st.integers(2, 4))
    latency_s, token_s = data.draw(st.sampled_from([(0.0, 0.0), (0.1, 0.0), (0.5, 0.01)]))
    machine = Machine(
        message_latency_s=latency_s, message_bytes_per_token=token_s, network_bytes_per_s=1.0
    )
    plan = problem.plan(strategy, **({"pipeline_stages": stages} if "pp" in strategy else {}))
    run = execute(plan, problem.model, pipeline_stages=stages, machine=machine)
    tokens = [*run.times.most_tokens.tolist(), *[0] * len(run.padding_ranks)]
    expected = slowly(run, [latency_s + token_s * one for one in tokens])
    for kind, found in (("F", run.forward_start_s), ("B", run.backward_start_s)):
        known = [[expected[kind, m, s] for m in range(len(tokens))] for s in range(stages)]
        np.testing.assert_allclose(found, known, rtol=1e-9, atol=1e-12)

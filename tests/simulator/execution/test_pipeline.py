"""Ranks and stages that wait for each other, by hand."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hdp.planner.lockstep import slots
from megatron_hdp.planner.pipeline import Pipeline
from megatron_hdp.simulator.execution import Machine, StepExecution, execute
from tests.planner.problems import Problem, problems
from tests.planner.test_interleaved_execution import fed_by, interleaved, with_paddings_named
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
    run = execute(plan_of([[0], [0]]), COSTS, pipeline=Pipeline(2))
    assert run.forward_start_s.tolist() == [[0.0, 1.0], [1.0, 4.0]]
    assert run.backward_start_s.tolist() == [[4.0, 7.0], [2.0, 5.0]]
    assert run.end_s.tolist() == [[9.0], [7.0]]


def test_messages_between_stages_take_their_time() -> None:
    run = execute(plan_of([[0], [0]]), COSTS, pipeline=Pipeline(2), machine=HALF_A_SECOND)
    assert run.forward_start_s.tolist() == [[0.0, 1.0], [1.5, 4.5]]
    assert run.backward_start_s.tolist() == [[5.0, 8.0], [2.5, 5.5]]
    assert run.makespan_s == 10.0


def test_a_ring_joins_two_pipelines() -> None:
    # the ring is first on both; rank 0 runs two more
    run = execute(plan_of([[0, 1], [0], [0]]), COSTS, pipeline=Pipeline(2))
    assert run.forward_start_s.tolist() == [[0.0, 1.0, 6.0], [1.0, 4.0, 7.0]]
    assert run.backward_start_s.tolist() == [[4.0, 7.0, 10.0], [2.0, 5.0, 8.0]]
    assert run.end_s.tolist() == [[12.0, 6.0], [10.0, 4.0]]


def test_padding_takes_a_position() -> None:
    # the ring is second on rank 0: rank 1 runs padding before it, as long as what holds nothing
    run = execute(plan_of([[0], [0, 1]]), COSTS, pipeline=Pipeline(2))
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
    assert together.forward_s[0].tolist() == pytest.approx([2.0, 2.0, 0.02, 0.02])


def test_lockstep_reaches_through_rings() -> None:
    # 0 and 1 share experts, so do 2 and 3; the ring of 1 and 2 joins all four at position 0
    costs = COSTS.__class__(a=0.0, b=1.0, kv_bytes_per_token=0.0)
    run = execute(plan_of([[0], [1, 2], [3]], lengths=[9, 2, 3]), costs, lockstep_ranks=2)
    assert run.end_s.tolist() == [[9.0] * 4]


def test_virtual_stages_by_hand() -> None:
    # two micro-batches, two stages of two chunks: 0.5 s forward and 1 s backward on each row
    run = execute(plan_of([[0], [0]]), COSTS, pipeline=Pipeline(2, 2))
    assert run.forward_start_s.tolist() == [[0.0, 0.5], [0.5, 1.0], [1.0, 1.5], [1.5, 3.0]]
    assert run.backward_start_s.tolist() == [[5.5, 6.5], [4.5, 5.5], [3.0, 4.5], [2.0, 3.5]]
    # 6 s of work, and half of one of two 3 s at the ends
    assert run.end_s.tolist() == [[7.5], [6.5]]
    assert run.busy_s.tolist() == [6.0]


def test_messages_pass_every_boundary_of_chunks() -> None:
    # one micro-batch and its padding; three boundaries forward, three backward
    plan = plan_of([[0]])
    pipeline = Pipeline(2, 2)
    alone = execute(plan, COSTS, pipeline=pipeline)
    sent = execute(plan, COSTS, pipeline=pipeline, machine=Machine(message_latency_s=10.0))
    assert alone.padding_ranks.tolist() == [0]
    assert alone.forward_start_s[:, 0].tolist() == [0.0, 0.5, 1.0, 1.5]
    assert sent.forward_start_s[:, 0].tolist() == [0.0, 10.5, 21.0, 31.5]
    assert sent.backward_start_s[:, 0].tolist() == [65.0, 54.0, 43.0, 32.0]


def test_rows_take_their_weights() -> None:
    # 2 s forward and 4 s backward in all: rows have 1/8, 2/8, 1/8 and 4/8 of them
    pipeline = Pipeline(2, 2, weights=(1, 2, 1, 4))
    run = execute(plan_of([[0]]), COSTS, pipeline=pipeline)
    assert run.forward_s[:, 0].tolist() == [0.25, 0.5, 0.25, 1.0]
    assert run.backward_s[:, 0].tolist() == [0.5, 1.0, 0.5, 2.0]
    assert run.forward_start_s[:, 0].tolist() == [0.0, 0.25, 0.75, 1.25]  # behind padding
    assert run.busy_s.tolist() == [3.0]  # mean of 1.5 and 4.5


def order_of(queue: list[int], stage: int, pipeline: Pipeline) -> list[tuple[str, int, int]]:
    """Pass, micro-batch and row of each operation of a stage, in Megatron's order."""
    stages, chunks = pipeline.stages, pipeline.chunks
    if chunks > 1:
        order = interleaved(queue, stage, stages, chunks, stages)
        return [(kind, m, chunk * stages + stage) for kind, m, chunk in order]
    warm_up = min(stages - 1 - stage, len(queue))
    plain = [("F", m) for m in queue[:warm_up]]
    for i in range(len(queue) - warm_up):
        plain += [("F", queue[warm_up + i]), ("B", queue[i])]
    plain += [("B", m) for m in queue[len(queue) - warm_up :]]
    return [(kind, m, stage) for kind, m in plain]


def slowly(run: StepExecution, lag_s: list[float]) -> dict[tuple[str, int, int], float]:
    """When each forward and backward starts: every stage of every rank has its list of Megatron's
    schedule, and what stands first on all of its ranks runs, once its message is there."""
    plan, pipeline = run.plan, run.pipeline
    queues, rings = with_paddings_named(
        plan, slots(plan, aligned=True, group_size=pipeline.group_size)
    )
    lists = {
        (rank, stage): order_of(queue, stage, pipeline)
        for rank, queue in enumerate(queues)
        for stage in range(pipeline.stages)
    }
    seconds = {"F": run.forward_s, "B": run.backward_s}
    free = dict.fromkeys(lists, 0.0)
    starts: dict[tuple[str, int, int], float] = {}

    def arrival(kind: str, m: int, row: int) -> float | None:
        """When what an operation needs is there; None as long as nobody made it."""
        needs = fed_by(kind, m, row, pipeline.rows - 1)
        if needs is None:
            return 0.0
        if needs not in starts:
            return None
        sent = needs[2] != row
        return float(starts[needs] + seconds[needs[0]][needs[2], m]) + (lag_s[m] if sent else 0.0)

    while any(lists.values()):
        before = len(starts)
        for (_, stage), order in lists.items():
            if not order:
                continue
            kind, m, row = order[0]
            places = [(rank, stage) for rank in rings[m]]
            there = arrival(kind, m, row)
            if there is None or any(lists[place][:1] != [(kind, m, row)] for place in places):
                continue
            starts[kind, m, row] = max(there, *(free[place] for place in places))
            for place in places:
                free[place] = float(starts[kind, m, row] + seconds[kind][row, m])
                lists[place].pop(0)
        assert len(starts) > before, "they wait for each other for ever"
    return starts


@settings(max_examples=40)
@given(problems(), st.sampled_from(["naive", "bytescale", "pp-balance"]), st.data())
def test_any_plan_on_pipelines(problem: Problem, strategy: str, data: Any) -> None:
    problem = dataclasses.replace(problem, lengths=problem.lengths[:12])
    stages, chunks = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 3))
    weights = data.draw(st.sampled_from([(), tuple(range(1, stages * chunks + 1))]))
    pipeline = Pipeline(stages, chunks, weights)
    latency_s, token_s = data.draw(st.sampled_from([(0.0, 0.0), (0.1, 0.0), (0.5, 0.01)]))
    machine = Machine(
        message_latency_s=latency_s, message_bytes_per_token=token_s, network_bytes_per_s=1.0
    )
    planned = {"pipeline_stages": stages, "virtual_stages": chunks} if "pp" in strategy else {}
    plan = problem.plan(strategy, **planned)
    run = execute(plan, problem.model, pipeline=pipeline, machine=machine)
    tokens = [*run.times.most_tokens.tolist(), *[0] * len(run.padding_ranks)]
    expected = slowly(run, [latency_s + token_s * one for one in tokens])
    for kind, found in (("F", run.forward_start_s), ("B", run.backward_start_s)):
        known = [[expected[kind, m, r] for m in range(len(tokens))] for r in range(pipeline.rows)]
        np.testing.assert_allclose(found, known, rtol=1e-9, atol=1e-12)

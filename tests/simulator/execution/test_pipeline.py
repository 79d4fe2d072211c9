"""Ranks and stages that wait for each other, by hand."""

import pytest

from megatron_hdp.simulator.execution import Machine, execute
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

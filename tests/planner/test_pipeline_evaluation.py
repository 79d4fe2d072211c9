"""The exact 1F1B schedule against cases worked out by hand, and against the C++ planner's."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hdp.planner import CostModel, Plan, evaluate, plan
from tests.planner.problems import COST_MODELS, Problem, agree, problems, repeatable, rings_of

SECONDS = CostModel(a=0.0, b=1.0, kv_bytes_per_token=0.0)  # a token takes a second


def queues(*of_ranks: list[tuple[int, ...]], tokens: dict[tuple[int, ...], int]) -> Plan:
    """A plan in which rank r runs the rings ``of_ranks[r]``; a ring's ``tokens`` are one sequence.

    A ring is named by its ranks and, last, a number that tells rings of the same ranks apart.
    """
    order: list[tuple[int, ...]] = []
    waiting = [list(rings) for rings in of_ranks]
    while any(waiting):
        ring = next(
            rings[0]
            for rings in waiting
            if rings and all(waiting[r][0] == rings[0] for r in rings[0][:-1])
        )
        order.append(ring)
        for rank in ring[:-1]:
            waiting[rank].pop(0)
    members = [ring[:-1] for ring in order]
    return rings_of(members, [tokens[ring] for ring in order], num_ranks=len(of_ranks))


def one_rank(*seconds: int) -> Plan:
    rings = [(0, i) for i in range(len(seconds))]
    return queues(rings, tokens=dict(zip(rings, seconds, strict=True)))


def test_one_micro_batch_takes_its_time_however_many_stages() -> None:
    for stages in (1, 2, 3, 8):
        assert evaluate(one_rank(12), SECONDS, stages).makespan_s == pytest.approx(12)


def test_two_stages_two_micro_batches_by_hand() -> None:
    # 12 s: forward 2 s, backward 4 s on each of two stages
    # stage 0: F0 0-2, F1 2-4, B0 8-12, B1 14-18; stage 1: F0 2-4, B0 4-8, F1 8-10, B1 10-14
    result = evaluate(one_rank(12, 12), SECONDS, 2)
    np.testing.assert_allclose(result.forward_start_s, [[0, 2], [2, 8]])
    np.testing.assert_allclose(result.backward_start_s, [[8, 14], [4, 10]])
    assert result.makespan_s == pytest.approx(18)
    assert result.start_s.tolist() == pytest.approx([0, 2])
    assert result.busy_s.tolist() == pytest.approx([12])
    assert result.efficiency == pytest.approx(12 / 18)


def test_alike_micro_batches_take_their_share_and_one_ramp() -> None:
    for stages in (2, 4, 8):
        for num in (1, 3, 8, 20):
            found = evaluate(one_rank(*[24] * num), SECONDS, stages)
            assert found.makespan_s == pytest.approx((num + stages - 1) * 24 / stages)


def test_a_heavy_micro_batch_in_the_middle_costs_a_bubble() -> None:
    # between forward and backward of the heavy one, stage 0 does one backward (1 s) before and one
    # forward (0.5 s) after it, in the 45 s that it needs on the other stage: F 15 | B 30
    # stage 0: F0 0-.5, F1 .5-15.5, B0 15.5-16.5, F2 16.5-17, B1 60.5-90.5, B2 92-93
    # stage 1: F0 .5-1, B0 1-2, F1 15.5-30.5, B1 30.5-60.5, F2 60.5-61, B2 61-62
    result = evaluate(one_rank(3, 90, 3), SECONDS, 2)
    assert result.backward_start_s[0].tolist() == pytest.approx([15.5, 60.5, 90.5])
    assert result.makespan_s == pytest.approx(91.5)


def test_a_ring_waits_for_all_members_on_the_same_stage() -> None:
    # rank 0: 6 s then the ring (24 tokens on two ranks: 12 s); rank 1: 12 s then the ring
    ring = (0, 1, 0)
    made = queues([(0, 0), ring], [(1, 0), ring], tokens={(0, 0): 6, (1, 0): 12, ring: 24})
    result = evaluate(made, SECONDS, 2)
    # rank 1 alone: as two micro-batches of 12 s
    assert result.makespan_s == pytest.approx(18)
    assert result.forward_start_s[:, 2].tolist() == pytest.approx([2, 8])


def test_ranks_with_different_counts_of_micro_batches() -> None:
    ring = (0, 1, 0)
    rings = [[ring], [ring, (1, 0), (1, 1), (1, 2)]]
    tokens = {ring: 24, (1, 0): 12, (1, 1): 12, (1, 2): 12}
    made = queues(*rings, tokens=tokens)
    made.validate(pipeline_stages=4)
    assert evaluate(made, SECONDS, 4).makespan_s == pytest.approx(4 * 3 + 9)


def test_a_deadlock_is_reported() -> None:
    ring, other = (0, 1, 0), (0, 1, 1)
    tokens = {ring: 24, other: 24, (0, 0): 12, (1, 0): 12, (1, 1): 12, (1, 2): 12}
    # rank 1 meets the second ring two positions later than rank 0: 1F1B of two stages puts its
    # forward behind the backward of the first ring there, and in front of it on rank 0
    made = queues([ring, other], [ring, (1, 0), (1, 1), other], tokens=tokens)
    with pytest.raises(ValueError, match=r"deadlock with 2 pipeline stages: micro-batches 0 \("):
        evaluate(made, SECONDS, 2)
    assert evaluate(made, SECONDS).makespan_s > 0  # one stage has no such trap


def test_stages_must_be_positive() -> None:
    with pytest.raises(ValueError, match="pipeline_stages is 0; expected at least 1"):
        evaluate(one_rank(3), SECONDS, 0)


@pytest.mark.parametrize("strategy", ["static", "pp-balance"])
@repeatable(60)
@given(problem=problems(), stages=st.integers(2, 9))
def test_python_and_cpp_agree(strategy: str, problem: Problem, stages: int) -> None:
    cost_model = COST_MODELS[problem.cost_model]
    made = problem.plan(strategy, cost_model=cost_model, pipeline_stages=stages)
    result = evaluate(made, cost_model, stages)
    agree(made, result)
    if cost_model.a == cost_model.b == 0:
        return
    starts = result.forward_start_s + result.duration_s / (3 * stages)
    assert (np.diff(result.forward_start_s, axis=0) >= np.diff(starts, axis=0) - 1e-9).all()
    assert (result.backward_start_s >= starts - 1e-9).all()


def test_the_target_is_the_share_and_the_ramp_of_a_full_micro_batch() -> None:
    made = plan([10] * 8, ranks=2, tokens_per_rank=10, cost_model=SECONDS, pipeline_stages=4)
    result = evaluate(made, SECONDS, 4)
    assert result.pipeline_bound_s == pytest.approx(40 / 4 + 3 / 4 * 10)
    assert result.makespan_s == pytest.approx(17.5)

"""No plan beats the bounds under any table, be its attention per token rising, falling or neither.

Convexity is no premise of the bounds: where attention per token falls, a short sequence may hide
the traffic of a long one, and many short ones take more than one that is as long as all of them.
"""

import dataclasses
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hdp.planner import CostModel, Plan, evaluate, lower_bound_s, plan, tight_bound_s
from tests.planner.problems import (
    EXECUTED_STRATEGIES,
    Problem,
    agree,
    longest_that_fits,
    rank_speeds,
    repeatable,
    rings_of,
)

quickly = repeatable(100)


@dataclasses.dataclass(frozen=True)
class TableProblem(Problem):
    """A problem with a cost model of its own."""

    table: CostModel = CostModel(a=0.0, b=0.0, kv_bytes_per_token=0.0)

    @property
    def model(self) -> CostModel:
        return dataclasses.replace(self.table, rank_speeds=self.speeds)


@st.composite
def tables(draw: st.DrawFn, longest: int) -> CostModel:
    """Slopes that rise, fall or do anything; traffic of about the same size as attention."""
    ends = sorted(draw(st.sets(st.integers(1, longest), min_size=1, max_size=6)))
    slopes = draw(
        st.lists(
            st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0, 5.0]) | st.floats(0, 3),
            min_size=len(ends),
            max_size=len(ends),
        )
    )
    slopes = draw(st.sampled_from([slopes, sorted(slopes), sorted(slopes, reverse=True)]))
    widths = np.diff(ends, prepend=0).tolist()
    seconds = accumulate(slope * width for slope, width in zip(slopes, widths, strict=True))
    return CostModel(
        a=0.0,
        b=draw(st.sampled_from([0.0, 0.01, 1.0])),
        kv_bytes_per_token=draw(st.sampled_from([0.0, 0.01, 0.1, 1.0])),
        g=draw(st.sampled_from([0.0, 0.0, 3.0])),
        intra_node_bytes_per_s=draw(st.sampled_from([1.0, 10.0])),
        inter_node_bytes_per_s=1.0,
        ranks_per_node=draw(st.integers(1, 4)),
        attention_points=tuple(zip(ends, seconds, strict=True)),
    )


@st.composite
def table_problems(draw: st.DrawFn) -> TableProblem:
    """Few ranks and sequences, long and short, so that plans come near the bounds."""
    ranks = draw(st.integers(1, 6))
    multiple = draw(st.sampled_from([1, 1, 2]))
    capacity = draw(st.integers(2 * multiple, 60))
    longest = longest_that_fits(ranks, capacity, multiple)
    short = st.integers(1, max(1, min(longest, capacity) // 3))
    lengths = draw(st.lists(st.integers(1, longest) | short, min_size=1, max_size=8))
    return TableProblem(
        lengths=tuple(lengths),
        ranks=ranks,
        tokens_per_rank=capacity,
        slice_multiple=multiple,
        cost_model="",
        speeds=draw(rank_speeds(ranks)),
        table=draw(tables(longest)),
    )


@pytest.mark.parametrize("strategy", EXECUTED_STRATEGIES)
@quickly
@given(problem=table_problems())
def test_no_strategy_beats_the_bounds(strategy: str, problem: TableProblem) -> None:
    made = problem.plan(strategy)
    made.validate()
    agree(made, evaluate(made, problem.model))
    lowest = lower_bound_s(np.array(problem.lengths), problem.ranks, problem.model)
    assert lowest <= problem.proven_s * (1 + 1e-9)
    assert problem.proven_s <= made.summary["makespan_s"] * (1 + 1e-9)


@repeatable(150)
@given(problem=table_problems(), seed=st.integers(0, 9))
def test_no_random_plan_beats_the_bounds(problem: TableProblem, seed: int) -> None:
    result = evaluate(problem.random_plan(seed), problem.model)
    assert problem.proven_s <= result.makespan_s * (1 + 1e-9)
    assert result.lower_bound_s <= result.makespan_s * (1 + 1e-9)


@pytest.mark.parametrize("strategy", ["static", "pp-balance"])
@quickly
@given(problem=table_problems(), stages=st.integers(2, 4))
def test_no_pipeline_beats_its_bound(strategy: str, problem: TableProblem, stages: int) -> None:
    made = problem.plan(strategy, pipeline_stages=stages)
    made.validate(pipeline_stages=stages)
    agree(made, evaluate(made, problem.model, stages))


CONCAVE = CostModel(
    a=0.0,
    b=0.0,
    kv_bytes_per_token=1.0,
    intra_node_bytes_per_s=1.0,
    inter_node_bytes_per_s=1.0,
    attention_points=((1, 300.0), (100, 300.0)),
)


def one_micro_batch(lengths: list[int], ranks: int, capacity: int, local: int) -> Plan:
    """The first sequences shared by all ranks, the last `local` ones whole on the first rank."""
    shared = len(lengths) - local
    return rings_of(
        [range(ranks)],
        lengths,
        sequences=[range(shared)],
        tokens_per_rank=capacity,
        local_offsets=[0, local],
        local_sequences=range(shared, len(lengths)),
        local_ranks=[0] * local,
    )


def test_short_sequences_hide_a_long_ones_traffic() -> None:
    # on two ranks 100 tokens take 150 s and send for 600 s, one takes 150 s and sends for 6 s;
    # the first of two steps hides traffic: 150 + 600 - 75 s, both 300 + 606 - 150 s
    hides = dataclasses.replace(CONCAVE, kv_bytes_per_token=4.0)
    made = one_micro_batch([100, 1], 2, 60, 0)
    made.validate()
    alone, both = evaluate(one_micro_batch([100], 2, 60, 0), hides), evaluate(made, hides)
    assert (alone.makespan_s, both.makespan_s) == pytest.approx((675, 756))
    arguments = {"ranks": 2, "tokens_per_rank": 60, "cost_model": hides}
    assert tight_bound_s([100], **arguments) == pytest.approx(675)
    assert tight_bound_s([100, 1], **arguments) <= 756
    made.validate(pipeline_stages=3)
    result = evaluate(made, hides, 3)
    assert result.makespan_s == pytest.approx(756)
    assert result.lower_bound_s <= 756


def test_many_short_ones_fill_what_a_fast_rank_waits() -> None:
    # 100 tokens on ranks of speed 1 and 0.1: 1,500 s on the slow one, 150 s on the fast one, which
    # computes four of 10 tokens meanwhile, 300 s each; one of 40 would take 300 s
    speeds = dataclasses.replace(CONCAVE, kv_bytes_per_token=0.0, rank_speeds=(1.0, 0.1))
    made = one_micro_batch([100, 10, 10, 10, 10], 2, 90, 4)
    made.validate()
    assert evaluate(made, speeds).makespan_s == pytest.approx(1500)
    proven = tight_bound_s(made.lengths, ranks=2, tokens_per_rank=90, cost_model=speeds)
    assert proven <= 1500 * (1 + 1e-9)
    assert tight_bound_s([100], ranks=2, tokens_per_rank=90, cost_model=speeds) == pytest.approx(
        1500
    )


@pytest.mark.parametrize("a", [0.0, 0.01])
def test_a_fast_member_of_a_pipelines_ring_has_time_for_more(a: float) -> None:
    # the slow member takes a second a token for its half, the fast one has half of that to spare
    model = CostModel(a=a, b=1.0, kv_bytes_per_token=0.0, rank_speeds=(1.0, 0.5))
    made = one_micro_batch([100, 49], 2, 99, 1)
    made.validate(pipeline_stages=2)
    result = evaluate(made, model, 2)
    assert result.makespan_s == pytest.approx(100 + a * 100**2)
    assert result.lower_bound_s <= result.makespan_s * (1 + 1e-9)


def test_the_bound_of_a_table_is_not_idle() -> None:
    """Attention per token falls only up to 8 tokens, so that long sequences' traffic counts."""
    window = CostModel(
        a=0.0,
        b=1e-3,
        kv_bytes_per_token=1.0,
        intra_node_bytes_per_s=100.0,
        inter_node_bytes_per_s=100.0,
        attention_points=((4, 0.01), (8, 0.01), (400, 1.6)),
    )
    lengths = [400, 400, 3, 5, 3]
    arguments = {"ranks": 8, "tokens_per_rank": 50, "cost_model": window}
    made = plan(lengths, **arguments)
    proven = tight_bound_s(lengths, **arguments)
    assert not window.attention_table.rises_per_token
    assert proven > 5 * made.summary["lower_bound_s"]
    assert proven == pytest.approx(made.summary["makespan_s"], rel=0.05)

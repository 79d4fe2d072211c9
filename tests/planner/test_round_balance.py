"""Rounds of aligned groups, planned all at once: their rules, and never later than dynamic-cp's."""

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_hdp.data.presets import preset_lengths
from megatron_hdp.planner import evaluate, plan
from tests.planner.problems import Problem, agree, problems, repeatable
from tests.planner.test_dynamic_cp import cut, made_rounds

STRATEGY = "round-balance"


def odd_problem(*lengths: int, ranks: int, tokens_per_rank: int, **others: Any) -> Problem:
    settings = {"slice_multiple": 1, "cost_model": "alternating", "speeds": ()} | others
    return Problem(lengths, ranks, tokens_per_rank, **settings)


ONE_SLOW_RANK = (0.01, *[1.0] * 63)


@repeatable(150)
@given(problem=problems().map(cut), stages=st.integers(1, 3))
@example(problem=odd_problem(1, 1, 17, ranks=24, tokens_per_rank=2), stages=1)
@example(problem=odd_problem(1, 17, 18, 33, ranks=64, tokens_per_rank=2), stages=2)
@example(
    problem=odd_problem(
        *(1, 119, 254, 193, 193, 1, 97), ranks=64, tokens_per_rank=24, speeds=ONE_SLOW_RANK
    ),
    stages=1,
)
@example(problem=odd_problem(1, 257, ranks=64, tokens_per_rank=8, cost_model="attention"), stages=1)
def test_every_rank_runs_equally_many_on_aligned_groups(problem: Problem, stages: int) -> None:
    made = problem.plan(STRATEGY, pipeline_stages=stages)
    made.validate(pipeline_stages=stages)
    agree(made, evaluate(made, problem.model, stages))
    assert made.summary["max_tokens_on_a_rank"] <= problem.tokens_per_rank
    assert len({len(made.micro_batches_of(rank)) for rank in range(problem.ranks)}) == 1
    for number in range(made.num_micro_batches):
        ranks, degree = made.micro_batch(number).ranks, len(made.micro_batch(number).ranks)
        assert ranks == tuple(range(ranks[0], ranks[0] + degree))
        is_aligned = degree & (degree - 1) == 0 and ranks[0] % degree == 0
        assert is_aligned or degree == problem.ranks
    assert problem.plan(STRATEGY, pipeline_stages=stages).fingerprint() == made.fingerprint()
    other = problem.plan("dynamic-cp", pipeline_stages=stages)
    near_s = 1.005 * made.summary["efficiency"] * made.summary["makespan_s"]  # good enough
    makespan_s = max(near_s, other.summary["makespan_s"])
    assert made.summary["makespan_s"] <= makespan_s * (1 + 1e-12)


@pytest.mark.parametrize("num_sequences", [1, 3, 8, 9, 17])
@pytest.mark.parametrize("ranks", [1, 4, 8])
def test_groups_of_rounds_are_whole_where_sequences_suffice(ranks: int, num_sequences: int) -> None:
    rng = np.random.default_rng(num_sequences)
    lengths = rng.integers(1, 60, num_sequences)
    made = plan(
        *(lengths,),
        ranks=ranks,
        tokens_per_rank=64,
        strategy=STRATEGY,
        pipeline_stages=2,
        virtual_stages=2,
    )
    rounds = made_rounds(made)
    assert all(one for of_ranks in rounds for one in of_ranks)
    if num_sequences >= 2 * ranks:
        assert len(rounds) % 2 == 0


@pytest.mark.parametrize("preset", ["github", "byted"])
@pytest.mark.parametrize("stages", [1, 4])
def test_it_is_faster_than_rounds_that_know_nothing_of_each_other(preset: str, stages: int) -> None:
    lengths = preset_lengths(preset, num_tokens=4 * 256 * 8192, max_length=2**20)
    common: dict[str, Any] = {"ranks": 256, "tokens_per_rank": 8192, "pipeline_stages": stages}
    makespan_s = {
        strategy: plan(lengths, strategy=strategy, **common).summary["makespan_s"]
        for strategy in ("dynamic-cp", STRATEGY)
    }
    assert makespan_s[STRATEGY] < 0.95 * makespan_s["dynamic-cp"]
    if stages == 1:
        assert plan(lengths, strategy=STRATEGY, **common).summary["efficiency"] > 0.98


def test_what_some_ranks_lack_they_share_with_neighbours() -> None:
    # the fourth rank needs three rounds for the short ones; the others have two of theirs parted
    # from one, and a third that two ranks share
    made = plan([100] * 3 + [10] * 20, ranks=4, tokens_per_rank=100, strategy=STRATEGY)
    assert made_rounds(made) == [
        [[21], [21], [22], [22]],
        [[0], [1], [2], list(range(3, 13))],
        [[14, 18], [15, 19], [16, 20], [13, 17]],
    ]

"""Algorithm 2 of the paper: what it decides on small cases, and that it is near linear."""

import numpy as np
import pytest

from megatron_hdp.data.presets import preset_lengths
from megatron_hdp.planner import CostModel, Plan, plan, slice_tokens
from tests.planner.problems import rings

LINEAR = CostModel(a=0.0, b=1.0, kv_bytes_per_token=0.0)


def bytescale(lengths: list[int], ranks: int, tokens_per_rank: int, **others: object) -> Plan:
    arguments = {"strategy": "bytescale", "cost_model": LINEAR} | others
    return plan(lengths, ranks=ranks, tokens_per_rank=tokens_per_rank, **arguments)  # type: ignore[arg-type]


def test_at_the_start_all_ranks_are_targets() -> None:
    # 20 tokens need two ranks of 10; in the next round 2 and 3 are behind and take the next ones
    result = bytescale([20, 9, 8, 7], ranks=4, tokens_per_rank=10)
    assert rings(result) == [((0, 1), (0,)), ((2,), (1,)), ((3,), (2,)), ((3,), (3,))]


def test_a_sequence_that_needs_more_ranks_than_are_behind_takes_others() -> None:
    # after 20 tokens on ranks 0 and 1, only rank 2 is behind: 19 tokens take it and rank 0
    result = bytescale([20, 19], ranks=3, tokens_per_rank=10)
    assert rings(result) == [((0, 1), (0,)), ((0, 2), (1,))]
    assert result.summary["makespan_s"] == 10 + 9.5


def test_short_sequences_share_a_micro_batch() -> None:
    result = bytescale([6, 5, 5, 4], ranks=2, tokens_per_rank=10, slice_multiple=1)
    assert result.summary["makespan_s"] == 10
    assert sorted(len(sequences) for _, sequences in rings(result)) == [2, 2]


def test_a_slow_rank_gets_less() -> None:
    result = bytescale([10] * 30, ranks=2, tokens_per_rank=10, rank_speeds=[1.0, 0.5])
    assert [len(result.micro_batches_of(rank)) for rank in (0, 1)] == [20, 10]


def test_degrees_are_the_least_and_sequences_that_fit_stay_whole() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, size=300)
    result = bytescale(lengths.tolist(), ranks=13, tokens_per_rank=17)
    result.validate()
    for ranks, sequences in rings(result):
        length = lengths[sequences[0]] if len(sequences) == 1 else 1
        assert len(ranks) == next(d for d in range(1, 14) if slice_tokens(length, d) <= 17)


@pytest.mark.parametrize("preset", ["github", "byted"])
def test_it_beats_the_paper_s_naive_plans(preset: str) -> None:
    lengths = preset_lengths(preset, num_tokens=4 * 256 * 8192, max_length=2**20)
    arguments = {"ranks": 256, "tokens_per_rank": 8192}
    balanced = plan(lengths, strategy="bytescale", **arguments).summary["makespan_s"]
    naive = plan(lengths, strategy="naive", **arguments).summary["makespan_s"]
    assert balanced < 0.9 * naive


@pytest.mark.parametrize("cost_model", [None, CostModel(a=0.0, b=0.0, kv_bytes_per_token=0.0)])
def test_it_is_near_linear(cost_model: CostModel | None) -> None:
    # quadratic in ranks, rounds or buckets it would take minutes
    lengths = preset_lengths("github", num_tokens=2**29, max_length=2**21)
    lengths = np.concatenate([lengths, np.full(300_000 - len(lengths), 500)])
    result = plan(
        lengths, ranks=16_384, tokens_per_rank=8192, strategy="bytescale", cost_model=cost_model
    )
    assert result.summary["planning_ms"] < 20_000

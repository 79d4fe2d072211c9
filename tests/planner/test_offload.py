"""Offload: degrees below the memory minimum, with ratios that the host keeps up with."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given

from megatron_hdp.planner import CostModel, Plan, compute_s, plan, slice_tokens
from tests.planner.problems import Problem, problems, repeatable, rings

PAPERS_STRATEGIES = ("naive", "bytescale")

quickly = repeatable(100)

# 1 s a token; 4 layers; the host takes 100 bytes of activations a second, 1 byte a token
FAST_HOST = CostModel(
    a=0.0,
    b=1.0,
    kv_bytes_per_token=0.0,
    activation_bytes_per_token=1.0,
    host_bytes_per_s=100.0,
    num_layers=4,
)
LIMITED = dataclasses.replace(FAST_HOST, host_bytes_per_s=0.49)


def offloaded(lengths: list[int], ranks: int, **others: object) -> Plan:
    arguments = {"cost_model": FAST_HOST, "strategy": "naive", "offload": "auto"} | others
    return plan(lengths, ranks=ranks, tokens_per_rank=10, **arguments)  # type: ignore[arg-type]


def test_half_of_the_layers_stay() -> None:
    # at ratio 1 a rank holds 2 x 10 tokens; at 2/3 of the other two layers 15 x (2 + 2/3) / 4 = 10;
    # a half of 21 is padded to 12 tokens: 12 x (2 + 4/3) / 4 = 10
    result = offloaded([21, 20, 15, 10], ranks=2)
    assert [(len(ranks), sequences) for ranks, sequences in rings(result)] == [
        *((2, (0,)), (1, (1,)), (1, (2,)), (1, (3,))),
    ]
    assert result.offload_ratios.tolist() == pytest.approx([1 / 3, 1, 2 / 3, 0])
    result.validate(num_layers=4)


def test_without_a_freed_rank_nothing_is_offloaded() -> None:
    # 21 tokens need 3 ranks of 10 as they are, 2 of them by memory; 40 s / 3 are enough for that
    assert len(offloaded([21, 21, 21], ranks=3).micro_batch(0).ranks) == 2
    assert offloaded([20, 10, 3], ranks=4, offload="off").offload_ratios.max() == 0
    twelve = offloaded([24], ranks=3, cost_model=LIMITED)  # 2 ranks: 2 x 2 tokens in 24 / 3 s
    assert len(twelve.micro_batch(0).ranks) == 3
    assert twelve.offload_ratios.max() == 0


@pytest.mark.parametrize("strategy", PAPERS_STRATEGIES)
def test_a_sequence_that_would_outlast_the_others_keeps_its_ranks(strategy: str) -> None:
    # 20 tokens fit on one rank by offload, which takes 20 s; the mean of four ranks is 10 s
    long_one = offloaded([20, 5, 5, 5, 5], ranks=4, strategy=strategy).micro_batch(0)
    assert (len(long_one.ranks), long_one.offload_ratio) == (2, 0)
    among_others = offloaded([20] * 4, ranks=4, strategy=strategy)
    assert (len(among_others.micro_batch(0).ranks), among_others.offload_ratios[0]) == (1, 1)


def test_a_batch_that_needs_offload_says_so() -> None:
    with pytest.raises(ValueError, match='add ranks, or use offload="auto", which needs 1'):
        offloaded([15], ranks=1, offload="off")
    assert offloaded([15], ranks=1).offload_ratios.tolist() == pytest.approx([2 / 3])
    with pytest.raises(ValueError, match="needs 2 ranks .* or add ranks, or use streams=True"):
        offloaded([21], ranks=1)
    with pytest.raises(ValueError, match='raise tokens_per_rank, or use offload="auto"'):
        offloaded([15], ranks=1, slice_multiple=6, offload="off")


def test_the_host_holds_so_much() -> None:
    """Of 20 and 15 tokens on a rank 10 and 5 leave, at 1 byte each."""
    limited = offloaded([20, 15], ranks=2, host_memory_bytes=9)
    assert [len(ranks) for ranks, _ in rings(limited)] == [2, 1]
    assert limited.offload_ratios.tolist() == pytest.approx([0, 2 / 3])
    with pytest.raises(ValueError, match="needs 2 ranks .* or add ranks, or raise host_memory_by"):
        offloaded([20], ranks=1, host_memory_bytes=9)
    with pytest.raises(ValueError, match="host_memory_bytes is nan; expected a number of bytes"):
        offloaded([20], ranks=1, host_memory_bytes=float("nan"))


def fits(problem: Problem, length: int, degree: int) -> bool:
    """Whether the host takes what a rank cannot hold: written apart from the planner."""
    model = problem.model
    tokens = slice_tokens(length, degree, problem.slice_multiple)
    excess = tokens - problem.tokens_per_rank
    if excess <= 0:
        return True
    if model.activation_bytes_per_token == 0:
        return False
    if model.num_layers <= 2 or 2 * tokens > problem.tokens_per_rank * model.num_layers:
        return False
    per_token = model.a * length + model.attention_b + model.b + model.b_experts
    forward_s = per_token * length / degree / 3
    return excess * model.activation_bytes_per_token <= model.host_bytes_per_s * forward_s


def is_whole(problem: Problem, length: int, degree: int) -> bool:
    """Whether a slice fits without offload."""
    return slice_tokens(length, degree, problem.slice_multiple) <= problem.tokens_per_rank


@pytest.mark.parametrize("strategy", PAPERS_STRATEGIES)
@quickly
@given(problem=problems(offload=True))
def test_degrees_are_the_least_that_memory_and_host_allow(strategy: str, problem: Problem) -> None:
    """And the mean time of a rank, as far as memory would have so many ranks anyway."""
    result = problem.plan(strategy)
    result.validate(num_layers=problem.model.num_layers)
    seconds = compute_s(np.array(problem.lengths), problem.model)
    share_s = seconds.sum() / problem.ranks
    for m in range(result.num_micro_batches):
        batch = result.micro_batch(m)
        degree = len(batch.ranks)
        if len(batch.sequences) > 1:
            assert degree == 1 and batch.offload_ratio == 0
            continue
        length = problem.lengths[batch.sequences[0]]
        possible = [d for d in range(1, problem.ranks + 1) if fits(problem, length, d)]
        without = [d for d in possible if is_whole(problem, length, d)]
        most = without[0] if without else problem.ranks
        parts = seconds[batch.sequences[0]] / share_s if share_s else 0.0
        wanted = {min(most, np.ceil(parts * (1 + off))) for off in (-1e-9, 1e-9)}  # of rounding
        assert degree in {
            next((d for d in possible if least <= d <= most), possible[0]) for least in wanted
        }
        assert (batch.offload_ratio == 0) == is_whole(problem, length, degree)


@quickly
@given(problem=problems(offload=True))
def test_dp_balance_offloads_only_what_the_host_takes(problem: Problem) -> None:
    result = problem.plan("dp-balance")
    result.validate(num_layers=problem.model.num_layers)
    for m in range(result.num_micro_batches):
        batch = result.micro_batch(m)
        if batch.offload_ratio == 0:
            continue
        assert len(batch.sequences) == 1
        assert fits(problem, problem.lengths[batch.sequences[0]], len(batch.ranks))

"""A cost model with layers that have a window: what attention takes, and what a plan costs."""

import dataclasses

import numpy as np
import pytest

from megatron_hdp.planner import CostModel, evaluate, plan
from megatron_hdp.planner.bounds import attention_s, compute_s
from tests.planner.problems import small_plan

ONE_IN_FOUR_IS_FULL = CostModel(
    a=2.0,
    b=3.0,
    g=10.0,
    kv_bytes_per_token=1.0,
    intra_node_bytes_per_s=1e9,
    inter_node_bytes_per_s=5.0,
    window_tokens=8,
    window_share=0.75,
    halo_bytes=35.0,
)


def test_pairs_of_query_and_key_are_counted() -> None:
    lengths = np.array([1, 8, 9, 24])
    pairs = [sum(min(i, 8) for i in range(1, n + 1)) for n in lengths]  # half of the diagonal less
    diagonal = np.minimum(lengths, 8)
    expected = 2 * (0.25 * lengths**2 + 0.75 * (2 * np.array(pairs) - diagonal))
    assert attention_s(lengths, ONE_IN_FOUR_IS_FULL).tolist() == pytest.approx(expected.tolist())
    assert compute_s(lengths, ONE_IN_FOUR_IS_FULL)[3] == pytest.approx(expected[3] + 72)


def test_a_plan_by_hand() -> None:
    # 24 tokens: 2 (144 + 0.75 x 8 x 40) = 768, + 72, over 3; + g; + 35 / 5 for the halo; rank 2
    # has 8 + 2 x 3 more
    result = evaluate(small_plan(), ONE_IN_FOUR_IS_FULL)
    assert result.duration_s[0] == pytest.approx(840 / 3 + 10 + 7 + 14)
    # 9 tokens: 2 (81 / 4 + 0.75 x 8 x 10) + 27
    assert result.duration_s[1] == pytest.approx(160.5 + 27 + 10)
    without = dataclasses.replace(ONE_IN_FOUR_IS_FULL, halo_bytes=0.0)
    assert evaluate(small_plan(), without).duration_s[0] == pytest.approx(840 / 3 + 10 + 14)
    assert result.ring_bytes - evaluate(small_plan(), without).ring_bytes == 3 * 35


def test_long_sequences_in_a_window_take_fewer_ranks() -> None:
    """The longest takes most ranks where its square counts, and its tokens' share where not."""
    lengths = np.array([4000, 1000, 1000, 1000, 1000])
    full = CostModel(a=1e-6, b=1e-5, kv_bytes_per_token=1.0, block_s=1e-3)
    window = dataclasses.replace(full, window_tokens=100, window_share=1.0)
    degrees = []
    for cost_model in (full, window):
        made = plan(lengths, ranks=8, tokens_per_rank=4000, cost_model=cost_model)
        (place,) = np.flatnonzero(made.sequences == 0)
        found = np.searchsorted(made.sequence_offsets, place, side="right") - 1
        degrees.append(int(np.diff(made.rank_offsets)[found]))
    assert degrees[0] > degrees[1]

"""What each strategy decides on small cases, and which arguments ``plan`` refuses."""

import numpy as np
import pytest

from megatron_hdp.planner import CostModel, chunk_tokens, evaluate, plan, slice_tokens
from tests.planner.problems import rings

pytestmark = pytest.mark.smoke

LAUNCH_BOUND = CostModel(a=0.0, b=1.0, kv_bytes_per_token=0.0, g=5.0)


@pytest.mark.parametrize(
    ("length", "degree", "multiple", "chunk", "on_a_rank"),
    [
        (7, 1, 1, 7, 7),
        (7, 1, 4, 8, 8),
        (24, 3, 1, 4, 8),
        (25, 3, 1, 5, 10),
        (24, 3, 3, 6, 12),
        (1, 5, 2, 2, 4),
        (2**40, 2**20, 1, 2**19, 2**20),
    ],
)
def test_slices(length: int, degree: int, multiple: int, chunk: int, on_a_rank: int) -> None:
    assert chunk_tokens(length, degree, multiple) == chunk
    assert slice_tokens(length, degree, multiple) == on_a_rank


def test_slices_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="degree is 0"):
        slice_tokens(7, 0)


def test_static_packs_in_order_best_fit_and_deals_round_robin() -> None:
    # 20 tokens at capacity 10 need degree 2: pairs 0-1 and 2-3; slices of 10, 6, 8, 2, 4 tokens
    result = plan([20, 12, 16, 4, 8], ranks=4, tokens_per_rank=10, strategy="static")
    assert rings(result) == [((0, 1), (0,)), ((2, 3), (1, 4)), ((0, 1), (2, 3))]


def test_static_degree_is_the_least_divisor_that_holds_the_context() -> None:
    for max_length, degree in ((10, 1), (11, 2), (21, 3), (31, 6)):
        result = plan([5], ranks=6, tokens_per_rank=10, strategy="static", max_length=max_length)
        assert rings(result) == [(tuple(range(degree)), (0,))]


def test_naive_takes_least_degrees_and_the_ranks_with_fewest_micro_batches() -> None:
    # 31 needs 4 ranks (of 3 each would hold 2 x ceil(31 / 6) = 12); 12 needs 2; 9 | 7 + 3 | 6
    result = plan([3, 12, 6, 31, 9, 7], ranks=5, tokens_per_rank=10, strategy="naive")
    assert rings(result) == [
        ((0, 1, 2, 3), (3,)),
        ((0, 4), (1,)),
        ((1,), (4,)),
        ((2,), (5, 0)),
        ((3,), (2,)),
    ]


def test_dp_balance_raises_the_degree_of_a_giant() -> None:
    result = plan([8000, *[100] * 8], ranks=8, tokens_per_rank=8192)
    assert len(result.micro_batch(0).ranks) > 1
    naive = plan([8000, *[100] * 8], ranks=8, tokens_per_rank=8192, strategy="naive")
    assert result.summary["makespan_s"] < 0.3 * naive.summary["makespan_s"]


def test_dp_balance_does_not_expose_a_ring() -> None:
    slow = CostModel(a=1e-9, b=1e-6, kv_bytes_per_token=1e5, intra_node_bytes_per_s=1e9)
    result = plan([8000, *[100] * 8], ranks=8, tokens_per_rank=8192, cost_model=slow)
    assert evaluate(result, slow).exposed_s.max() == 0


def test_dp_balance_keeps_small_rings_in_one_node() -> None:
    lengths = [20_000] * 40 + [1000] * 50
    result = plan(lengths, ranks=32, tokens_per_rank=8192)
    nodes = [{rank // 8 for rank in ranks} for ranks, _ in rings(result)]
    assert {len(node) for node in nodes} == {1}


def test_dp_balance_fills_spare_room_where_that_saves_micro_batches() -> None:
    result = plan([12, 12, *[2] * 8], ranks=4, tokens_per_rank=10, cost_model=LAUNCH_BOUND)
    assert result.num_micro_batches == 2
    assert len(result.local_sequences) == 8
    assert result.summary["makespan_s"] == pytest.approx(6 + 4 + 5)


@pytest.mark.parametrize("capacity", [4, 8])
def test_dp_balance_shards_nothing_that_balances_whole(capacity: int) -> None:
    # static cuts every sequence in two, to the same makespan
    arguments = {"ranks": 4, "tokens_per_rank": capacity, "max_length": capacity + 1}
    free_network = CostModel(a=1.0, b=1.0, kv_bytes_per_token=0.0)
    static = plan([4] * 8, strategy="static", cost_model=free_network, **arguments)
    balanced = plan([4] * 8, cost_model=free_network, **arguments)
    assert balanced.summary["makespan_s"] == static.summary["makespan_s"]
    assert static.summary["ring_tokens"] == 32
    assert balanced.summary["ring_tokens"] == 0


def test_dp_balance_takes_the_lean_plan_of_two_that_are_nearly_as_fast() -> None:
    # whole: 1,000 | 1,000 | 998 | 998; wider rings would gain 0.1 %
    free_network = CostModel(a=0.0, b=1.0, kv_bytes_per_token=0.0, g=1e-3)
    result = plan([1000, 1000, 998, 998], ranks=4, tokens_per_rank=1000, cost_model=free_network)
    assert result.summary["ring_tokens"] == 0


def test_dp_balance_widens_a_ring_where_that_pays() -> None:
    # rings of two on three ranks would leave one idle; no attention hides traffic, but it is small
    fast_network = CostModel(a=0.0, b=1.0, kv_bytes_per_token=1.0, g=1e-3)
    arguments = {"ranks": 3, "tokens_per_rank": 60, "cost_model": fast_network}
    result = plan([100] * 5, max_length=1000, **arguments)  # too long for static's help
    naive = plan([100] * 5, strategy="naive", **arguments)
    assert result.summary["makespan_s"] < 0.7 * naive.summary["makespan_s"]
    assert result.summary["efficiency"] > 0.99


def test_auto_is_recorded_as_what_it_resolves_to() -> None:
    auto = plan([5, 6], ranks=2, tokens_per_rank=10)
    explicit = plan([5, 6], ranks=2, tokens_per_rank=10, strategy="dp-balance")
    assert auto.strategy == "dp-balance"
    assert auto.fingerprint() == explicit.fingerprint()


def test_balance_on_a_long_tail() -> None:
    lengths = np.random.default_rng(0).lognormal(7.5, 1.5, size=600).astype(np.int64) + 1
    result = plan(np.minimum(lengths, 500_000), ranks=64, tokens_per_rank=8192)
    result.validate()
    assert result.summary["lower_bound_s"] / result.summary["makespan_s"] > 0.9


BAD_ARGUMENTS = [
    ({"lengths": []}, "lengths is empty"),
    ({"lengths": [5, 0]}, "sequence 1 of the batch has 0 tokens; expected at least 1"),
    ({"lengths": [5, -3]}, "sequence 1 of the batch has -3 tokens"),
    ({"lengths": [5.0]}, "lengths has dtype float64; expected integers"),
    ({"lengths": [float("nan")]}, "lengths has dtype float64"),
    ({"lengths": [2**70]}, "lengths has dtype object"),
    ({"lengths": np.array([2**63], dtype=np.uint64)}, "lengths holds 9223372036854775808"),
    (
        {"lengths": [2**41]},
        "length of sequence 0 of the batch is 2,199,023,255,552; expected 1 to 1,099,511,627,776",
    ),
    ({"lengths": [[5]]}, "lengths has 2 dimensions"),
    ({"ranks": 0}, "ranks is 0; expected at least 1"),
    ({"ranks": -2}, "ranks is -2; expected at least 1"),
    ({"ranks": 2.0}, r"ranks is 2\.0; expected an integer"),
    ({"ranks": 2**21}, "number of ranks is 2,097,152; expected 1 to 1,048,576"),
    ({"ranks": 2**70}, "ranks is 1,180,591,620,717,411,303,424"),
    ({"tokens_per_rank": 0}, "tokens_per_rank is 0; expected at least 1"),
    ({"tokens_per_rank": -8}, "tokens_per_rank is -8"),
    ({"slice_multiple": 0}, "slice_multiple is 0"),
    ({"ranks_per_node": 0}, "ranks_per_node is 0"),
    ({"max_length": 4}, "sequence 0 of the batch has 5 tokens, more than the context length 4"),
    ({"strategy": "dp_balance"}, r"strategy is 'dp_balance'; .* \(nearest: dp-balance\)"),
    (
        {"lengths": [512] * 7 + [65_536], "ranks": 7, "tokens_per_rank": 8192},
        r"sequence 7 of the batch has 65,536 tokens and needs 8 ranks at 8,192 tokens each; "
        'there are 7: raise tokens_per_rank or add ranks, or use offload="auto", which needs 5',
    ),
    (
        {"lengths": [4], "tokens_per_rank": 3, "slice_multiple": 2},
        r"sequence 0 of the batch has 4 tokens and cannot be shared at 3 tokens a rank \(.* 2 x 2",
    ),
    (
        {"max_length": 50, "strategy": "static"},
        "static: a context of 50 tokens does not fit on 2 ranks at 10 tokens each",
    ),
]


@pytest.mark.parametrize(("change", "message"), BAD_ARGUMENTS, ids=lambda value: str(value)[:50])
def test_bad_arguments(change: dict[str, object], message: str) -> None:
    arguments = {"lengths": [5], "ranks": 2, "tokens_per_rank": 10} | change
    with pytest.raises(ValueError, match=message):
        plan(**arguments)  # type: ignore[arg-type]

"""The extension refuses what numpy and Python can get wrong, without the checks of ``plan``."""

import threading

import numpy as np
import pytest

from megatron_hdp.planner.extension import _core

ARGUMENTS = {
    "activation_bytes_per_token": 0.0,
    "host_bytes_per_s": 1.0,
    "num_layers": 1,
    "attention_b": 0.0,
    "block_s": 0.0,
    "intra_node_hop_s": 0.0,
    "inter_node_hop_s": 0.0,
    "merge_b": 0.0,
    "window_tokens": 0,
    "window_share": 0.0,
    "halo_s": 0.0,
    "attention_lengths": np.array([], dtype=np.int64),
    "attention_seconds": np.array([], dtype=np.float64),
    "rank_speeds": np.array([], dtype=np.float64),
    "pipeline_stages": 1,
    "model_chunks": 1,
    "row_weights": np.ones(1),
    "offload": False,
    "effort": 1,
    "b_experts": 0.0,
    "expert_ranks": 1,
    "lengths": np.array([20, 5, 5]),
    "strategy": "dp-balance",
    "num_ranks": 2,
    "tokens_per_rank": 10,
    "slice_multiple": 1,
    "max_length": 20,
    "a": 1.0,
    "b": 1.0,
    "g": 0.0,
    "kv_bytes_per_token": 1.0,
    "intra_node_bytes_per_s": 1.0,
    "inter_node_bytes_per_s": 1.0,
    "ranks_per_node": 8,
}


def call(**changes: object) -> dict[str, object]:
    arguments = ARGUMENTS | changes
    strategy = arguments.pop("strategy")
    problem = _core.Problem(arguments.pop("lengths"), **arguments)  # type: ignore[arg-type]
    return dict(_core.plan(problem, strategy))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"lengths": np.array([20.0])},
            "lengths has dtype float64 and 1 dimensions; expected int64",
        ),
        ({"lengths": np.array([20], dtype=np.int32)}, "lengths has dtype int32"),
        ({"lengths": np.array([[20]])}, "lengths has dtype int64 and 2 dimensions"),
        ({"lengths": np.array([], dtype=np.int64)}, "there are 0 sequences"),
        ({"lengths": np.array([20, -7])}, "length of sequence 1 of the batch is -7; expected 1 to"),
        ({"num_ranks": 0}, "number of ranks is 0; expected 1 to 1,048,576"),
        ({"num_ranks": -(2**63)}, "number of ranks is -9,223,372,036,854,775,808"),
        ({"tokens_per_rank": -1}, "tokens per rank is -1"),
        ({"slice_multiple": 2**62}, "slice multiple is 4,611,686,018,427,387,904"),
        (
            {"max_length": 0},
            "sequence 0 of the batch has 20 tokens, more than the context length 0",
        ),
        ({"max_length": 2**41}, "context length is 2,199,023,255,552; expected 1 to"),
        ({"a": float("nan")}, "cost model: a is nan; expected a finite number, 0 or 1e-30 to 1e"),
        ({"b": -1.0}, "cost model: b is -1"),
        ({"g": float("inf")}, "cost model: g is inf"),
        (
            {"intra_node_bytes_per_s": 0.0},
            "intra_node_bytes_per_s is 0; expected a finite number, 1e-30",
        ),
        ({"ranks_per_node": 0}, "ranks_per_node is 0"),
        ({"attention_b": -1.0}, "cost model: attention_b is -1"),
        ({"block_s": float("inf")}, "cost model: block_s is inf"),
        ({"intra_node_hop_s": -1.0}, "cost model: intra_node_hop_s is -1"),
        ({"inter_node_hop_s": float("nan")}, "cost model: inter_node_hop_s is nan"),
        ({"merge_b": -1.0}, "cost model: merge_b is -1"),
        (
            {"attention_lengths": np.array([5])},
            "attention_lengths has 1 entries and attention_seconds 0; expected as many of both",
        ),
        ({"attention_lengths": np.array([5.0])}, "attention_lengths has dtype float64"),
        ({"attention_seconds": np.array([[5.0]])}, "attention_seconds has dtype float64 and 2 dim"),
        (
            {"attention_lengths": np.array([5]), "attention_seconds": np.array([2.0])},
            "cost model: a is 1 beside attention_points; expected 0",
        ),
        (
            {"strategy": "auto"},
            "strategy is 'auto'; expected static, naive, bytescale, dynamic-cp, dp-balance, "
            "pp-balance or ep-balance",
        ),
    ],
)
def test_bad_arguments(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(**change)


def test_strided_and_big_endian_lengths() -> None:
    strided = np.array([20, 0, 5, 0, 5, 0])[::2]
    assert np.array_equal(call(lengths=strided)["sequences"], call()["sequences"])
    with pytest.raises(ValueError, match="lengths has dtype >i8"):
        call(lengths=np.array([20, 5], dtype=">i8"))


def test_threads_get_the_same_plan() -> None:
    expected = call()["sequences"]
    results: list[object] = []
    threads = [threading.Thread(target=lambda: results.append(call())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert all(np.array_equal(result["sequences"], expected) for result in results)  # type: ignore[index]

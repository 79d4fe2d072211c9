"""The bars of a picture add up to what the evaluation says."""

import json

import numpy as np
import pytest

from megatron_hdp.planner import LLAMA_7B, CostModel, Plan, evaluate, plan
from megatron_hdp.simulator.lanes import lanes_of

COST = CostModel(a=0.0, b=1.0, kv_bytes_per_token=0.0)  # one second a token


def plan_of(lengths, micro_batches, num_ranks):
    """A plan from JSON, free of what a strategy would choose."""
    document = json.loads(plan([1], ranks=1, tokens_per_rank=1).to_json())
    document |= {
        "num_ranks": num_ranks,
        "tokens_per_rank": 1000,
        "sequence_lengths": lengths,
        "micro_batches": [{"offload_ratio": 0.0, "local": {}} | m for m in micro_batches],
    }
    made = Plan.from_json(json.dumps(document))
    made.validate()
    return made


def test_a_worked_example():
    made = plan_of(
        [30, 4, 2, 7],
        [
            {"ranks": [2, 0, 1], "sequences": [0], "local": {"1": [1], "2": [2]}},
            {"ranks": [1], "sequences": [3]},
        ],
        num_ranks=3,
    )
    lanes = lanes_of(made, evaluate(made, COST))
    assert lanes.rank.tolist() == [2, 0, 1, 1]
    assert lanes.micro_batch.tolist() == [0, 0, 0, 1]
    assert lanes.degree.tolist() == [3, 3, 3, 1]
    # 10 s of ring each; then rank 2 has 2 s and rank 1 has 4 s of local sequences, rank 0 waits
    assert lanes.start_s.tolist() == [0, 0, 0, 14]
    assert lanes.ring_end_s.tolist() == [10, 10, 10, 21]
    assert lanes.own_end_s.tolist() == [12, 10, 14, 21]


@pytest.mark.parametrize("strategy", ["static", "naive", "dp-balance"])
def test_bars_add_up_and_never_overlap(strategy):
    lengths = np.random.default_rng(0).integers(1, 5000, size=60)
    made = plan(lengths, ranks=7, tokens_per_rank=2000, strategy=strategy)
    evaluation = evaluate(made, LLAMA_7B)
    lanes = lanes_of(made, evaluation)
    busy = np.bincount(lanes.rank, weights=lanes.own_end_s - lanes.start_s, minlength=7)
    np.testing.assert_allclose(busy, evaluation.busy_s)
    assert lanes.own_end_s.max() == pytest.approx(evaluation.makespan_s)
    for rank in range(7):
        mine = np.flatnonzero(lanes.rank == rank)
        mine = mine[np.argsort(lanes.start_s[mine])]
        assert np.all(lanes.start_s[mine][1:] >= lanes.own_end_s[mine][:-1] - 1e-12)


def test_another_plan_is_refused():
    made, other = (plan(lengths, ranks=2, tokens_per_rank=8) for lengths in ([5] * 4, [5]))
    with pytest.raises(ValueError, match="pass the plan"):
        lanes_of(made, evaluate(other, COST))

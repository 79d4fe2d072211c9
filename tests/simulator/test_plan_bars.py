"""The bars of a picture add up to what the evaluation says."""

import json

import numpy as np
import pytest

from megatron_hdp.planner import LLAMA_7B, CostModel, Plan, evaluate, plan
from megatron_hdp.simulator.plan_bars import chart_of, lanes_of, of_chunk

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


def assert_they_add_up(lanes, busy_s):
    """Each rank's bars take so long, and none begins before the one before it has ended."""
    work = lanes.own_end_s - lanes.start_s
    np.testing.assert_allclose(np.bincount(lanes.rank, work, minlength=len(busy_s)), busy_s)
    for rank in range(len(busy_s)):
        mine = np.flatnonzero(lanes.rank == rank)
        mine = mine[np.argsort(lanes.start_s[mine])]
        assert np.all(lanes.start_s[mine][1:] >= lanes.own_end_s[mine][:-1] - 1e-12)


def test_a_wave_of_parts():
    """One micro-batch of 24 s on two stages, in four parts: each starts when the one before ends.

    Of it a part takes 1 s forward and 2 s backward on a stage; backward begins with the last one.
    """
    made = plan_of([24], [{"ranks": [0], "sequences": [0], "parts": 4}], num_ranks=1)
    bars = [lanes_of(made, evaluate(made, COST, 2), stage) for stage in (0, 1)]
    assert [one.part.tolist() for one in bars] == [[0, 1, 2, 3] * 2] * 2
    assert bars[0].start_s.tolist() == [0, 1, 2, 3, 13, 11, 9, 7]
    assert bars[1].start_s.tolist() == [1, 2, 3, 4, 11, 9, 7, 5]
    for one in bars:
        assert (one.own_end_s - one.start_s).tolist() == [1] * 4 + [2] * 4


@pytest.mark.parametrize("strategy", ["static", "naive", "dp-balance"])
def test_bars_add_up_and_never_overlap(strategy):
    lengths = np.random.default_rng(0).integers(1, 5000, size=60)
    made = plan(lengths, ranks=7, tokens_per_rank=2000, strategy=strategy)
    evaluation = evaluate(made, LLAMA_7B)
    lanes = lanes_of(made, evaluation)
    assert_they_add_up(lanes, evaluation.busy_s)
    assert lanes.own_end_s.max() == pytest.approx(evaluation.makespan_s)


def test_another_plan_is_refused():
    made, other = (plan(lengths, ranks=2, tokens_per_rank=8) for lengths in ([5] * 4, [5]))
    with pytest.raises(ValueError, match="pass the plan"):
        lanes_of(made, evaluate(other, COST))


TWO_STAGES = [
    {"ranks": [0, 1], "sequences": [0], "local": {"1": [1]}},
    {"ranks": [1], "sequences": [2]},
]


def test_a_worked_example_of_a_pipeline():
    made = plan_of([48, 12, 30], TWO_STAGES, num_ranks=2)
    evaluation = evaluate(made, COST, 2)
    # the ring takes 24 s and rank 1 has 12 s more: 6 s forward and 12 s backward on each stage
    first = lanes_of(made, evaluation, stage=0)
    assert first.rank.tolist() == [0, 1, 1, 0, 1, 1]
    assert first.micro_batch.tolist() == [0, 0, 1, 0, 0, 1]
    assert first.backward.tolist() == [False] * 3 + [True] * 3
    assert (first.own_end_s - first.start_s).tolist() == [4, 6, 5, 8, 12, 10]
    assert (first.ring_end_s - first.start_s).tolist() == [4, 4, 5, 8, 8, 10]
    last = lanes_of(made, evaluation, stage=1)
    assert last.start_s.tolist()[:2] == [6, 6]  # behind the forward of the slower member
    assert last.start_s.tolist()[3] == 12
    assert first.start_s.tolist()[3] == 24


@pytest.mark.parametrize(
    ("stages", "chunks", "weights"),
    [(2, 1, ()), (3, 1, ()), (2, 3, ()), (2, 3, (1, 2, 0, 5, 3, 1))],
)
def test_bars_of_every_stage_and_chunk_add_up(stages, chunks, weights):
    made = plan_of([48, 12, 30], TWO_STAGES, num_ranks=2)
    evaluation = evaluate(made, COST, stages, chunks, weights)
    shares = evaluation.pipeline.row_weights
    for stage in range(stages):
        lanes = lanes_of(made, evaluation, stage)
        whole = stages * evaluation.busy_s
        assert_they_add_up(lanes, whole * shares[stage::stages].sum())
        for chunk in range(chunks):
            own = of_chunk(lanes, chunk)
            assert_they_add_up(own, whole * shares[stages * chunk + stage])
            assert own.num_bars == lanes.num_bars / chunks
            assert own.backward.sum() == own.num_bars / 2


def test_a_slow_rank_has_longer_bars():
    slow = CostModel(a=0.0, b=1.0, kv_bytes_per_token=0.0, rank_speeds=(1.0, 0.5))
    made = plan_of([20, 4], [{"ranks": [0, 1], "sequences": [0], "local": {"1": [1]}}], num_ranks=2)
    lanes = lanes_of(made, evaluate(made, slow))
    assert lanes.ring_end_s.tolist() == [10, 20]
    assert lanes.own_end_s.tolist() == [10, 28]


def test_a_stage_that_is_not_there():
    made = plan([5], ranks=1, tokens_per_rank=5)
    with pytest.raises(ValueError, match="stage is 1; expected 0 to 0"):
        lanes_of(made, evaluate(made, COST), stage=1)


def test_a_chart_has_all_stages_or_the_first():
    made = plan_of([48, 12, 30], TWO_STAGES, num_ranks=2)
    evaluation = evaluate(made, COST, 3)
    every = chart_of(made, evaluation, max_rows=6)
    assert (every.num_rows, every.stages_a_rank, every.bars.num_bars) == (6, 3, 18)
    assert every.row.tolist()[:6] == [0, 3, 3, 0, 3, 3]
    assert every.row.tolist()[-3:] == [2, 5, 5]
    first = chart_of(made, evaluation, max_rows=5)
    assert (first.num_rows, first.stages_a_rank, first.row.tolist()) == (2, 1, [0, 1, 1, 0, 1, 1])

"""A cost model whose attention is a table: what is refused, what is written, what a plan costs."""

import dataclasses
import pickle
from pathlib import Path

import numpy as np
import pytest

from megatron_hdp.planner import LLAMA_7B, CostModel, evaluate, plan
from megatron_hdp.planner.bounds import attention_s, compute_s
from tests.planner.problems import EXECUTED_STRATEGIES, small_plan

TABLE = CostModel(
    a=0.0,
    b=2.0,
    g=10.0,
    kv_bytes_per_token=1.0,
    intra_node_bytes_per_s=1e9,
    inter_node_bytes_per_s=1e9,
    attention_points=((4, 16), (10, 100), (30, 700)),
)


def test_straight_lines_from_nothing_through_the_points_and_on() -> None:
    lengths = np.array([1, 4, 7, 10, 24, 30, 130])
    assert attention_s(lengths, TABLE).tolist() == pytest.approx([4, 16, 58, 100, 520, 700, 3700])
    assert compute_s(lengths, TABLE)[2] == pytest.approx(58 + 14)
    one = dataclasses.replace(TABLE, attention_points=[(10, 5)])
    assert attention_s(np.array([1, 10, 1000]), one).tolist() == pytest.approx([0.5, 5, 500])


def test_a_plan_by_hand() -> None:
    # ring: (520 + 2 x 24) / 3, + g; rank 2 has 8 + 2 x 2 more; rank 3: 86 + 18 + g;
    # then rank 0: (16 + 8) + (30 + 10) + g
    result = evaluate(small_plan(), TABLE)
    ring = 568 / 3 + 10 + 12
    assert result.duration_s.tolist() == pytest.approx([ring, 114, 74])
    assert result.total_compute_s == pytest.approx(568 + 12 + 104 + 24 + 40)
    # each member sends 48 bytes in 240 s, in two hops; each hides under 520 / 9 s of a step
    slow = dataclasses.replace(TABLE, intra_node_bytes_per_s=0.2)
    assert evaluate(small_plan(), slow).exposed_s.tolist() == pytest.approx(
        [240 - 2 * 520 / 9, 0, 0]
    )


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ({"1": 2}, r"attention_points is \{'1': 2\}; expected pairs"),
        ([1, 2], r"entry 0 of attention_points is 1; expected a pair \[length, seconds\]"),
        ([(5, 1), (6, 1, 2)], "entry 1 of attention_points is "),
        ([(5.0, 1)], "the length of entry 0 of attention_points is 5.0; expected an integer from"),
        ([(True, 1)], "the length of entry 0 of attention_points is True"),
        ([(0, 1)], "is 0; expected an integer from 1 to 1,099,511,627,776"),
        ([(2**40 + 1, 1)], "is 1099511627777; expected an integer from 1 to"),
        ([(5, 1), (5, 2)], "attention_points has 5 tokens behind 5; expected ascending lengths"),
        ([(2000, 1), (5, 2)], "attention_points has 5 tokens behind 2,000; .*: sort the points"),
        ([(5, 2.5), (1000, 2.25)], "has 2.25 s for 1,000 tokens; expected at least 2.5 s, which 5"),
        ([(5, -1)], "attention of 5 tokens is -1; expected a finite number >= 0"),
        ([(5, float("nan"))], "attention of 5 tokens is nan"),
        ([(5, float("inf"))], "attention of 5 tokens is inf"),
        ([(5, "1")], "attention of 5 tokens is '1'"),
    ],
)
def test_wrong_points(points: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"cost model: .*{message}"):
        CostModel(a=0.0, b=1.0, kv_bytes_per_token=1.0, attention_points=points)  # type: ignore[arg-type]


def test_a_file_keeps_the_points(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_bytes(TABLE.to_json())
    read = CostModel.from_json(path)
    assert read == TABLE and hash(read) == hash(TABLE)
    assert read.attention_points == ((4, 16.0), (10, 100.0), (30, 700.0))
    assert plan([24, 9, 4], ranks=4, tokens_per_rank=10, cost_model=read).num_micro_batches
    assert pickle.loads(pickle.dumps(read)) == TABLE  # with the arrays that it made
    path.write_bytes(b'{"a": 1e-9, "b": 1e-6, "kv_bytes_per_token": 1}')
    assert CostModel.from_json(path).attention_points == ()
    path.write_bytes(b'{"a": 0, "b": 1e-6, "kv_bytes_per_token": 1, "attention_points": [[2]]}')
    with pytest.raises(ValueError, match=r"cost.json: .*entry 0 of attention_points is \[2\]"):
        CostModel.from_json(path)


@pytest.mark.parametrize(
    ("strategy", "stages"),
    [*((name, 1) for name in EXECUTED_STRATEGIES), ("static", 4), ("pp-balance", 4)],
)
def test_a_table_of_squares_plans_as_squares_do(strategy: str, stages: int) -> None:
    slow = dataclasses.replace(LLAMA_7B, inter_node_bytes_per_s=2e9, g=1e-4, ranks_per_node=4)
    lengths = [*range(5000, 60_000, 9973), *range(17, 4096, 61), 4096, 4096]
    known = np.union1d(np.arange(1, 70_000, 7), lengths)
    points = tuple((s, slow.a * s * s) for s in known.tolist())
    table = dataclasses.replace(slow, a=0.0, attention_points=points)
    arguments = {"ranks": 16, "tokens_per_rank": 4096, "pipeline_stages": stages}
    ours, theirs = (
        plan(lengths, strategy=strategy, cost_model=model, **arguments) for model in (table, slow)
    )
    assert ours.fingerprint() == theirs.fingerprint()
    for key in ("makespan_s", "lower_bound_s", "efficiency"):
        assert ours.summary[key] == pytest.approx(theirs.summary[key], rel=1e-9)

"""The plan as a value: immutable, fingerprinted, written and read, seen by micro-batch and rank."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from megatron_hdp.planner import Plan, PlanError
from tests.planner.problems import Problem, small_plan

pytestmark = pytest.mark.smoke


def test_micro_batch_and_rank_views() -> None:
    plan = small_plan()
    ring = plan.micro_batch(0)
    assert (ring.ranks, ring.sequences) == ((0, 1, 2), (0,))
    assert (dict(ring.local), ring.offload_ratio) == ({2: (1,)}, 0.0)
    assert plan.micro_batch(2).sequences == (3, 4)
    assert [plan.micro_batches_of(rank).tolist() for rank in range(4)] == [[0, 2], [0], [0], [1]]
    with pytest.raises(IndexError, match="micro-batch is 3; there are 3"):
        plan.micro_batch(3)
    with pytest.raises(ValueError, match="rank is 4; expected 0 to 3"):
        plan.micro_batches_of(4)


def test_a_rank_without_micro_batches_is_legal() -> None:
    plan = Problem((5,), 4, 10, 1, "network-bound").plan("naive")
    plan.validate()
    assert plan.micro_batches_of(3).size == 0


def test_nothing_of_a_plan_can_be_changed() -> None:
    lengths = np.array([24, 2, 9, 4, 5])
    plan = small_plan(lengths=lengths, summary={"efficiency": 0.5})
    lengths[0] = 1
    assert plan.lengths[0] == 24
    with pytest.raises(ValueError, match="read-only"):
        plan.ranks[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        plan.micro_batches_of(0)[0] = 1
    with pytest.raises(TypeError):
        plan.summary["efficiency"] = 1.0  # type: ignore[index]
    with pytest.raises(AttributeError):
        plan.num_ranks = 5  # type: ignore[misc]


def test_a_pickled_plan_is_the_same_and_as_immutable() -> None:
    plan = pickle.loads(pickle.dumps(small_plan(summary={"efficiency": 0.5})))
    assert plan.fingerprint() == small_plan().fingerprint()
    assert plan.summary == {"efficiency": 0.5}
    assert not plan.lengths.flags.writeable
    error = pickle.loads(pickle.dumps(PlanError("fit", "too much")))
    assert (error.rule, str(error)) == ("fit", "plan breaks rule 'fit': too much")


def test_fingerprint_is_a_constant_of_the_format() -> None:
    assert small_plan().fingerprint() == 7651570491632867516


@pytest.mark.parametrize(
    "change",
    [
        {"num_ranks": 5},
        {"tokens_per_rank": 11},
        {"strategy": "static"},
        {"slice_multiple": 2},
        {"lengths": [24, 2, 9, 5, 4]},
        {"ranks": [0, 2, 1, 3, 0]},
        {"sequences": [0, 2, 4, 3]},
        {"sequence_offsets": [0, 1, 3, 4]},
        {"local_ranks": [1]},
        {"offload_ratios": [0.0, 0.0, 0.1]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_fingerprint_sees_every_field(change: dict[str, object]) -> None:
    assert small_plan(**change).fingerprint() != small_plan().fingerprint()


def test_fingerprint_leaves_the_summary_out() -> None:
    assert small_plan(summary={"planning_ms": 3.0}).fingerprint() == small_plan().fingerprint()


def test_json_is_exactly_the_schema(tmp_path: Path) -> None:
    plan = small_plan(summary={"efficiency": 0.5})
    assert orjson.loads(plan.to_json()) == {
        "version": 1,
        "num_ranks": 4,
        "tokens_per_rank": 10,
        "strategy": "naive",
        "sequence_lengths": [24, 2, 9, 4, 5],
        "micro_batches": [
            {"ranks": [0, 1, 2], "sequences": [0], "local": {"2": [1]}, "offload_ratio": 0.0},
            {"ranks": [3], "sequences": [2], "offload_ratio": 0.0},
            {"ranks": [0], "sequences": [3, 4], "offload_ratio": 0.0},
        ],
        "summary": {"efficiency": 0.5},
    }
    assert orjson.loads(small_plan(slice_multiple=2).to_json())["slice_multiple"] == 2
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").fingerprint() == plan.fingerprint()


def one(**changes: object) -> dict[str, object]:
    """A list of one micro-batch."""
    return {"micro_batches": [{"ranks": [0], "sequences": [], "offload_ratio": 0} | changes]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version is 2; expected 1: make the plan again"),
        ({"version": None}, "version is None; expected 1"),
        ({"num_ranks": 0}, "num_ranks is 0; expected an integer >= 1"),
        ({"num_ranks": 4.5}, r"num_ranks is 4\.5; expected an integer >= 1"),
        ({"tokens_per_rank": True}, "tokens_per_rank is True"),
        ({"slice_multiple": -1}, "slice_multiple is -1"),
        ({"sequence_lengths": [24, 2.5]}, r"sequence_lengths is \[24, 2\.5\]; expected a list"),
        ({"sequence_lengths": [2**63]}, "sequence_lengths is .*expected a list of integers"),
        ({"micro_batches": 3}, "micro_batches is 3; expected a list"),
        ({"micro_batches": [3]}, r"micro_batches\[0\] is 3; expected an object"),
        ({"micro_batches": [{"ranks": [0]}]}, r"micro_batches\[0\] lacks the key 'offload_ratio'"),
        (one(ranks=[2**31]), r"micro_batches\[0\]\.ranks is \[2147483648\]"),
        (one(offload_ratio="x"), r"micro_batches\[0\]\.offload_ratio is 'x'; expected a number"),
        (one(local={"-1": [0]}), r"micro_batches\[0\]\.local has the key '-1'; expected a rank"),
        ({"summary": {"efficiency": None}}, "summary.efficiency is None; expected a number"),
        ({"colour": 1}, "unknown key 'colour'; expected linear_tokens, micro_batches"),
    ],
)
def test_malformed_json_is_refused(change: dict[str, object], message: str) -> None:
    data = orjson.loads(small_plan().to_json()) | change
    with pytest.raises(ValueError, match=message):
        Plan.from_json(orjson.dumps(data))


def test_a_file_that_is_no_plan_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"version": 1')
    with pytest.raises(ValueError, match=r"plan\.json: plan: not JSON"):
        Plan.load(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"plan\.json: plan: plan is \[\]; expected an object"):
        Plan.load(path)


def test_a_plan_in_parts_is_another_plan_and_comes_back_from_json() -> None:
    whole, parts = small_plan(), small_plan(num_parts=[4, 1, 2], linear_tokens=2048.0)
    assert small_plan(num_parts=[1, 1, 1], linear_tokens=5.0).fingerprint() == whole.fingerprint()
    others = [small_plan(num_parts=[4, 1, 3], linear_tokens=2048.0)]
    others.append(small_plan(num_parts=[4, 1, 2], linear_tokens=2049.0))
    streams = small_plan(num_parts=[4, 1, 2], linear_tokens=2048.0, streams=[True, False, False])
    assert len({one.fingerprint() for one in (whole, parts, streams, *others)}) == 5
    for one in (parts, streams):
        assert Plan.from_json(one.to_json()).fingerprint() == one.fingerprint()
    assert [one.get("parts") for one in orjson.loads(parts.to_json())["micro_batches"]] == [
        4,
        None,
        2,
    ]
    assert b"parts" not in whole.to_json() and whole.parts_of_each.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_parts": [2, 2]}, "num_parts has 2 entries; expected 3"),
        ({"num_parts": [2, 0, 1]}, "micro-batch 1 runs in 0 parts"),
        ({"num_parts": [2, 1, 1], "linear_tokens": -1.0}, "linear_tokens is -1.0"),
        ({"num_parts": [2, 1, 1], "linear_tokens": float("nan")}, "linear_tokens is nan"),
        ({"num_parts": [2, 1, 1], "streams": [True]}, "streams has 1 entries; expected 3"),
        ({"num_parts": [2, 1, 1], "streams": [True, True, False]}, "micro-batch 1 streams in 1"),
        (
            {"num_parts": [2] * 3, "streams": [True] * 3, "offload_ratios": [0.0, 1.0, 0.3]},
            "ratio of micro-batch 2, a stream, is 0.3",
        ),
    ],
)
def test_senseless_parts_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        small_plan(**changes).validate()

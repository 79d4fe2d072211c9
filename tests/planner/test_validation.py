"""Planted faults: the checker catches each of them and names the rule and the culprit."""

import pytest

from megatron_hdp.planner import PlanError
from tests.planner.problems import rings_of, small_plan


def test_the_plan_without_a_fault_passes() -> None:
    small_plan().validate()
    small_plan().validate(num_layers=4)


FAULTS = [
    ("cover", {"sequences": [0, 2, 3, 3]}, r"sequence 3 is in micro-batches \[2, 2\]"),
    ("cover", {"local_sequences": [0]}, r"sequence 0 is in micro-batches \[0, 0\]"),
    ("cover", {"sequences": [0, 2, 3, 5]}, "micro-batch 2 holds sequence 5; there are 5"),
    ("cover", {"sequences": [0, -1, 3, 4]}, "micro-batch 1 holds sequence -1"),
    ("cover", {"lengths": [24, 2, 9, 4, 5, 1]}, "sequence 5 is in no micro-batch"),
    ("fit", {"lengths": [24, 3, 9, 4, 5]}, "micro-batch 0 holds 11 tokens on rank 2"),
    ("fit", {"lengths": [31, 2, 9, 4, 5]}, "micro-batch 0 holds 12 tokens on rank 0"),
    ("fit", {"lengths": [25, 2, 9, 4, 5]}, "micro-batch 0 holds 12 tokens on rank 2"),
    ("fit", {"lengths": [24, 2, 11, 4, 5]}, "micro-batch 1 holds 11 tokens on rank 3; the cap"),
    ("fit", {"slice_multiple": 3, "tokens_per_rank": 12}, "micro-batch 0 holds 15 tokens on rank"),
    ("fit", {"offload_ratios": [0.0, 0.5, 0.0]}, "micro-batch 1 offloads .* pass num_layers"),
    ("order", {"ranks": [0, 1, 1, 3, 0]}, "micro-batch 0 names rank 1 twice"),
    ("order", {"ranks": [0, 1, 2, 4, 0]}, "micro-batch 1 names rank 4; there are 4"),
    ("order", {"ranks": [0, 1, 2, -1, 0]}, "micro-batch 1 names rank -1"),
    ("order", {"local_ranks": [3]}, "local sequence 1 to rank 3, which is not in its ring"),
    ("order", {"local_ranks": [-1]}, "local sequence 1 to rank -1, which is not in its ring"),
    ("shape", {"rank_offsets": [0, 3, 4, 6]}, "rank_offsets runs from 0 to 6; expected 0 to 5"),
    ("shape", {"rank_offsets": [1, 3, 4, 5]}, "rank_offsets runs from 1 to 5; expected 0 to 5"),
    ("shape", {"rank_offsets": []}, "rank_offsets runs from nothing"),
    ("shape", {"rank_offsets": [0, 4, 3, 5]}, "rank_offsets falls after entry 1"),
    ("shape", {"rank_offsets": [0, 3, 3, 5]}, "micro-batch 1 has no ranks"),
    ("shape", {"sequence_offsets": [0, 1, 4]}, "sequence_offsets has 3 entries; expected 4"),
    ("shape", {"sequence_offsets": [0, 1, 1, 4]}, "micro-batch 1 has no sequences"),
    ("shape", {"local_offsets": [0, 1, 1, 2]}, "local_offsets runs from 0 to 2; expected 0 to 1"),
    ("shape", {"local_ranks": [2, 2]}, "local_ranks has 2 entries; local_sequences has 1"),
    ("shape", {"offload_ratios": [0.0, 1.5, 0.0]}, r"micro-batch 1 is 1\.5; expected 0 to 1"),
    ("shape", {"offload_ratios": [0.0, float("nan"), 0.0]}, "micro-batch 1 is nan; expected 0 to"),
    ("shape", {"offload_ratios": [0.0]}, "offload_ratios has 1 entries; expected 3"),
    ("shape", {"lengths": [24, 0, 9, 4, 5]}, "sequence 1 has no token"),
    ("shape", {"num_ranks": 0}, "num_ranks is 0"),
    ("shape", {"tokens_per_rank": 0}, "tokens_per_rank is 0"),
    ("shape", {"slice_multiple": 0}, "slice_multiple is 0"),
    (
        "shape",
        {
            "local_offsets": [0, 2, 2, 2],
            "local_sequences": [1, 4],
            "local_ranks": [2, 1],
            "sequence_offsets": [0, 1, 2, 3],
            "sequences": [0, 2, 3],
        },
        "local_ranks of micro-batch 0 are not ascending",
    ),
]


def caught_and_named(rule: str, change: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        small_plan(**change).validate()
    assert caught.value.rule == rule
    assert f"rule '{rule}'" in str(caught.value)


@pytest.mark.parametrize(("rule", "change", "message"), FAULTS, ids=lambda value: str(value)[:40])
def test_a_planted_fault_is_caught(rule: str, change: dict[str, object], message: str) -> None:
    caught_and_named(rule, change, message)


def test_with_offload_the_resident_share_counts() -> None:
    # 20 tokens on a rank of 10; of l layers, 2 + (1 - r) (l - 2) stay resident
    plan = small_plan(lengths=[24, 2, 20, 4, 5], offload_ratios=[0.0, 1.0, 0.0])
    plan.validate(num_layers=4)  # 20 x 2/4 = 10
    with pytest.raises(PlanError, match=r"20 tokens x 0\.6667 resident on rank 3"):
        plan.validate(num_layers=3)
    with pytest.raises(PlanError, match="20 tokens x 1 resident on rank 3"):
        plan.validate(num_layers=1)


def test_pipeline_stages_need_equal_positions() -> None:
    # rank 3 runs a micro-batch of its own first, then a ring with rank 0
    plan = rings_of([[3], [0, 3], [0]], [9, 12, 4])
    plan.validate()
    with pytest.raises(PlanError, match=r"micro-batch 1 stands .*\{0: 0, 3: 1\}") as caught:
        plan.validate(pipeline_stages=2)
    assert caught.value.rule == "order"
    small_plan().validate(pipeline_stages=4)


def test_arguments_out_of_range() -> None:
    with pytest.raises(ValueError, match="pipeline_stages is 0"):
        small_plan().validate(pipeline_stages=0)
    with pytest.raises(ValueError, match="num_layers is 0"):
        small_plan().validate(num_layers=0)

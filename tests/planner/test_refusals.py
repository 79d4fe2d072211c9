"""The planner's refusals name its arguments, or the flags of who called it."""

from pathlib import Path

import pytest

from megatron_hdp.options import PLANNER_FLAGS
from megatron_hdp.planner import plan, told_as
from megatron_hdp.planner.types import PlanError

NO_ROOM = {"ranks": 2, "tokens_per_rank": 10}


@pytest.mark.parametrize(
    ("names", "capacity", "longest"),
    [
        ({}, "tokens_per_rank", "max_length"),
        (PLANNER_FLAGS, "--hdp-tokens-per-rank", "--seq-length"),
    ],
)
def test_a_caller_gets_its_flags_and_python_the_arguments(
    names: dict[str, str], capacity: str, longest: str
) -> None:
    with pytest.raises(ValueError, match=f"raise {capacity} or add ranks"), told_as(names):
        plan([100], **NO_ROOM)
    with pytest.raises(ValueError, match=f"raise {longest} or cut it"), told_as(names):
        plan([10], max_length=5, **NO_ROOM)


def test_a_broken_rule_keeps_its_kind() -> None:
    with pytest.raises(PlanError) as found, told_as(PLANNER_FLAGS):
        raise PlanError("fit", "tokens_per_rank")
    assert found.value.rule == "fit"


def test_no_source_of_the_planner_names_a_flag() -> None:
    root = Path(__file__).parents[2]
    sources = [*root.glob("csrc/planner/**/*.cpp"), *root.glob("megatron_hdp/planner/*.py")]
    named = [path.name for path in sources if "--hdp-" in path.read_text()]
    assert sources and not named

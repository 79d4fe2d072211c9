"""Which slow tests CI runs, in which order, and what it does when the time is over."""

import pytest

from tests.support.scripts import script_module

with script_module("dev/slow_tests.py") as slow_tests:
    pass
FOLDERS = {"tests", "tests/planner", "tests/megatron", "tests/megatron/lm", "tests/scripts"}


@pytest.mark.parametrize(
    ("path", "room"),
    [
        ("megatron_hdp/megatron/lm/run.py", "tests/megatron/lm"),
        ("megatron_hdp/megatron/model/moe.py", "tests/megatron"),
        ("csrc/planner/rings/rings.cpp", "tests/planner"),
        ("scripts/dev/slow_tests.py", "tests/scripts"),
        ("tests/planner/test_fuzz.py", "tests/planner"),
        ("docs/train.md", None),
        ("megatron_hdp/plugin.py", None),
    ],
)
def test_a_change_leads_to_the_tests_of_its_room(path, room):
    assert slow_tests.room_of(path, FOLDERS) == room


def test_files_that_never_ran_come_first_then_the_newest_rooms():
    files = [f"tests/{name}" for name in ("a/test_1.py", "a/test_2.py", "b/test_3.py", "c/x.py")]
    order = slow_tests.ordered(files, ["tests/b", "tests/a"], {"tests/a/test_1.py": 5.0})
    assert order == ["tests/b/test_3.py", "tests/a/test_2.py", "tests/a/test_1.py"]


@pytest.mark.parametrize("lanes", [1, 2])
def test_what_did_not_run_and_what_failed_is_named(lanes):
    codes = {"passes": 0, "has none": 5, "fails": 1, "too long": None, "rest": None}
    assert slow_tests.run_all([*codes], codes.get, lanes) == (["too long", "rest"], ["fails"])

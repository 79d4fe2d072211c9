"""What the launcher does from the start of all ranks to the last one's end, on a made-up fleet."""

import pytest

from megatron_hdp.ray_launch.watching import Ended, report, watch


class Script:
    """A fleet whose exit codes are given look by look; the last look repeats."""

    def __init__(self, *looks):
        self.looks = list(looks)
        self.warned = 0
        self.killed = False

    def codes(self):
        codes = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        return [-9 if self.killed and code is None else code for code in codes]

    def warn(self):
        self.warned += 1

    def kill(self):
        self.killed = True


def watched(fleet, *, warned=False, grace_s=60.0):
    return watch(fleet, lambda: warned, grace_s=grace_s, poll_s=0.0)


def test_it_ends_when_all_ranks_have_ended():
    ended = watched(Script([None, None], [0, None], [0, 0]))
    assert ended == Ended((0, 0), frozenset()) and ended.exit_code() == 0
    assert report(ended, ["n1", "n2"], 1) == ""


def test_ranks_are_warned_again_until_they_end():
    fleet = Script([None, None], [None, None], [None, 0], [0, 0])
    assert watched(fleet, warned=True).exit_code() == 0
    assert fleet.warned == 3


def test_nobody_is_warned_without_a_warning():
    fleet = Script([None], [0])
    watched(fleet)
    assert fleet.warned == 0 and not fleet.killed


def test_ranks_that_go_on_after_a_failure_are_stopped_and_not_blamed():
    ended = watched(Script([None, 3, None]), grace_s=0.0)
    assert ended == Ended((-9, 3, -9), frozenset({0, 2}))
    assert ended.failed == {1: 3} and ended.exit_code() == 3
    assert report(ended, ["n1", "n2", "n3"], 1).splitlines() == [
        "rank 0 (node 0, n1): stopped, another rank had failed",
        "rank 1 (node 1, n2): exitcode : 3",
        "rank 2 (node 2, n3): stopped, another rank had failed",
    ]


def test_ranks_have_time_to_say_whom_they_blame():
    fleet = Script([None, -9], [None, -9], [3, -9])
    ended = watched(fleet)
    assert not fleet.killed and ended.stopped == frozenset()
    assert ended.exit_code() == 137
    assert report(ended, ["n1"], 2).endswith("rank 1 (node 0, n1): exitcode : -9 (SIGKILL)")


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ((3, 2), 2),
        ((2,), 2),
        ((3, 1, -9), 1),
        ((-9, 1), 1),
        ((3, -9), 137),
        ((3, -11, 0), 139),
        ((0, 3), 3),
        ((3, 77), 77),
    ],
)
def test_the_exit_code_is_that_of_the_rank_to_blame(codes, code):
    assert Ended(codes, frozenset()).exit_code() == code

"""A node's processes: seen to end at once, given up when they are stopped, none left behind."""

import signal
import sys
import time

import psutil
import pytest

from megatron_hdp.launching.node_ranks import Ended, NodeRanks

SLEEPS = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
ENDS = [sys.executable, "-S", "-c", "import os; os._exit(int(os.environ['LOCAL_RANK']))"]


def until(found):
    deadline = time.monotonic() + 30
    while not (result := found()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return result


def test_exit_codes_are_told_once():
    ranks = NodeRanks(ENDS, 2, {})
    ranks.start(7, 1, {})
    assert ranks.free_slots() == [0]
    assert until(ranks.ended) == [Ended(7, 1)]
    assert ranks.ended() == [] and ranks.free_slots() == [0, 1]


def test_what_is_stopped_is_killed_after_a_while():
    ranks = NodeRanks(SLEEPS, 1, {})
    ranks.start(0, 0, {})
    try:
        assert ranks.give_up_stopped(0.0) == []
        ranks.send(signal.SIGSTOP)
        assert until(lambda: ranks.give_up_stopped(0.05)) == [0]
        (ended,) = until(ranks.ended)
        assert ended.words() == "member 0 was killed by SIGKILL"
    finally:
        ranks.end(0.0)


@pytest.mark.parametrize("number", [signal.SIGCONT, signal.SIGSTOP])
def test_nothing_is_left_behind(number):
    before = psutil.Process().children()
    ranks = NodeRanks(SLEEPS, 2, {})
    for member in range(2):
        ranks.start(member, member, {})
    ranks.send(number)
    ranks.end(0.2)
    left = [one for one in psutil.Process().children() if one not in before]
    assert not [one for one in left if one.status() != "zombie"]

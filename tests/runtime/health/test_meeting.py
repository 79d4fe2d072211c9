"""Ranks that wait for one that prepares its data, longer than communication would let them."""

import time

import torch.distributed as dist

from megatron_hdp.runtime.health import meet
from megatron_hdp.runtime.timeline import MEETING, Timeline

LATE_S = 1.5


def seconds_of_meetings(is_late):
    """Body of a rank: how long two meetings took, and what the timeline says of them."""
    timeline, found = Timeline(), []
    for late in (is_late and dist.get_rank() == 1, False):
        time.sleep(LATE_S if late else 0)
        started = time.monotonic()
        meet(timeline)
        found.append(time.monotonic() - started)
    assert not any(kind == MEETING for kind, _, _ in timeline.current())
    return found


def test_all_wait_for_the_last(run_ranks):
    waits = run_ranks(3, seconds_of_meetings, True)
    assert waits[0][0] > 0.5 * LATE_S and waits[2][0] > 0.5 * LATE_S
    assert max(second for _, second in waits) < LATE_S


def test_alone_nobody_is_waited_for(run_ranks):
    assert max(run_ranks(1, seconds_of_meetings, False)[0]) < 0.5

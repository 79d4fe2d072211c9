"""Ranks that wait for one that prepares its data, longer than communication would let them."""

import time

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_hdp.runtime.health import meet
from megatron_hdp.runtime.timeline import MEETING, Timeline


def meetings():
    """Body of a rank: whether it came out of the first of two meetings after the last one came."""
    timeline, store = Timeline(), distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        time.sleep(0.3)
        store.add("the last one comes", 1)
    meet(timeline)
    was_there = store.add("the last one comes", 0)
    meet(timeline)
    assert not any(kind == MEETING for kind, _, _ in timeline.current())
    return was_there


def test_all_wait_for_the_last(run_ranks):
    assert run_ranks(3, meetings) == [1, 1, 1]


def alone():
    """Body of a rank."""
    meet(Timeline())


def test_alone_nobody_is_waited_for(run_ranks):
    run_ranks(1, alone)

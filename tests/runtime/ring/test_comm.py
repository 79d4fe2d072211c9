"""Rings over one communicator: what arrives, what is counted, and a member that never answers."""

import time
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_hdp.runtime.ring.comm import RingComm, Transfer
from megatron_hdp.runtime.ring.communicator import new_ring_group
from megatron_hdp.runtime.timeline import RING_WAIT
from tests.support.ring_cases import gloo_comm


def run_rings(rings):
    """Body of a rank: runs its part of each ring in order; what arrived, hop by hop."""
    comm = gloo_comm()
    arrived = []
    for number, ring in enumerate(rings):
        if dist.get_rank() not in ring:
            continue
        index = ring.index(dist.get_rank())
        tensor = torch.tensor([100.0 * number + dist.get_rank()])
        for _ in range(len(ring) - 1):
            tensor = comm.pass_on(tensor, ring, index).wait()
            arrived.append(tensor.item())
    return arrived, comm.bytes_sent


def test_rings_of_one_micro_batch_after_another(run_ranks):
    """Two disjoint rings at a time, then rings that cross them; ring order is not rank order."""
    rings = [(0, 1), (2, 3, 4), (4, 0, 2), (3, 1), (1, 4, 3, 0, 2)]
    results = run_ranks(5, run_rings, rings)
    for rank, (arrived, num_bytes) in enumerate(results):
        expected = [
            100.0 * number + ring[(ring.index(rank) - hop) % len(ring)]
            for number, ring in enumerate(rings)
            if rank in ring
            for hop in range(1, len(ring))
        ]
        assert arrived == expected
        assert num_bytes == 4 * len(expected)


def wait_for_a_silent_member(seconds):
    comm = gloo_comm(timedelta(seconds=seconds))
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(3 * seconds)
        return
    with pytest.raises(RuntimeError, match="a ring member did not answer"):
        comm.pass_on(torch.zeros(1 << 20), (0, 1), 0).wait()


def test_a_silent_member_is_an_error_in_bounded_time(run_ranks):
    """The bound is that of `run_ranks`."""
    run_ranks(2, wait_for_a_silent_member, 2)


class CountedWork:
    waits = 0

    def wait(self):
        self.waits += 1


@pytest.mark.parametrize("is_idle", [True, False])
@pytest.mark.parametrize("is_cuda", [True, False])
def test_waiting_twice_and_what_counts_as_lost_time(is_cuda, is_idle):
    """On a GPU each wait orders the stream that is current; gloo's works are waited for once."""
    comm, work = RingComm(None), CountedWork()
    received = SimpleNamespace(is_cuda=is_cuda)
    transfer = Transfer(comm, [work], torch.zeros(1), received)
    assert transfer.wait(is_idle) is received and transfer.wait(is_idle) is received
    assert work.waits == (2 if is_cuda else 1)
    assert (comm.timeline.totals_s[RING_WAIT] > 0) == (is_idle or not is_cuda)


def join_or_not():
    refused = pytest.raises(ValueError, match="rank 1 is in none of the lists")
    with refused if dist.get_rank() == 1 else nullcontext():
        new_ring_group([[0]])


def test_every_rank_needs_a_group(run_ranks):
    run_ranks(2, join_or_not)

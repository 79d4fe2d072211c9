"""Rings over one communicator, and over groups without one as other libraries use them."""

import time
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_hdp.runtime.ring.comm import RingComm, Transfer
from megatron_hdp.runtime.ring.communicator import new_ring_group
from megatron_hdp.runtime.ring.group import RingGroup, RingGroups
from megatron_hdp.runtime.timeline import RING_WAIT
from tests.support.ring_cases import gloo_comm


def hop(group, members, tensor, batched):
    """One hop of a ring as TransformerEngine's helper does it: even places send first."""
    place, size = dist.get_rank(group), dist.get_world_size(group)
    following, previous = members[(place + 1) % size], members[place - 1]
    received = torch.empty_like(tensor)
    calls = [(dist.isend, tensor, following, group), (dist.irecv, received, previous, group)]
    calls = calls if place % 2 == 0 else calls[::-1]
    if batched:
        return dist.batch_isend_irecv([dist.P2POp(*call) for call in calls]), received
    return [operation(*how) for operation, *how in calls], received


def run_rings(rings, num_layers, offset=0):
    """Body of a rank: each ring of each layer in turn; what arrived and how many bytes left.

    The HDP ranks are the job's ranks from `offset` on.
    """
    world = list(range(dist.get_world_size()))
    groups = [world] if offset == 0 else [world[:offset], world[offset:]]
    comm = RingComm(new_ring_group(groups))
    ring_groups = RingGroups(comm)
    me = dist.get_rank() - offset
    arrived = []
    for layer in range(num_layers):
        for ring in rings:
            if me not in ring or dist.get_rank() < offset:
                continue
            members = [rank + offset for rank in ring]
            group = ring_groups.of(ring)
            tensor = torch.tensor([100.0 * layer + me])
            for number in range(len(ring) - 1):
                works, tensor = hop(group, members, tensor, batched=bool((layer + number) % 2))
                for work in works:
                    work.wait()
                works[0].wait()  # again, which must not hang
                arrived.append(tensor.item())
    return arrived, comm.bytes_sent


def expected_of(rank, rings, num_layers):
    return [
        100.0 * layer + ring[(ring.index(rank) - number) % len(ring)]
        for layer in range(num_layers)
        for ring in rings
        if rank in ring
        for number in range(1, len(ring))
    ]


def test_rings_of_every_size_and_order(run_ranks):
    """Sizes 1 to 5, wrapped and reversed, several after another on the same ranks."""
    rings = [(0,), (1, 0), (4, 2, 3), (3, 4, 0, 1), (0, 2, 4, 3, 1), (4, 3, 2, 1, 0), (0, 1)]
    results = run_ranks(5, run_rings, rings, num_layers=6)
    for rank, (arrived, num_bytes) in enumerate(results):
        assert arrived == expected_of(rank, rings, 6)
        assert num_bytes == 4 * len(arrived)


def test_ranks_of_the_ring_are_hdp_ranks_not_those_of_the_job(run_ranks):
    rings = [(0, 1), (2, 0, 1)]
    results = run_ranks(5, run_rings, rings, num_layers=2, offset=2)
    assert [arrived for arrived, _ in results[2:]] == [expected_of(r, rings, 2) for r in range(3)]


def look_at_a_group():
    comm = gloo_comm()
    ring_groups, rank = RingGroups(comm), dist.get_rank()
    group = ring_groups.of((1, 2, 0))
    assert isinstance(group, dist.ProcessGroup)
    assert (dist.get_world_size(group), group.size()) == (3, 3)
    assert dist.get_rank(group) == group.rank() == (1, 2, 0).index(rank)
    assert dist.get_process_group_ranks(group) == [1, 2, 0]
    assert dist.get_backend(group) == "gloo"
    assert group.members == [1, 2, 0]
    group.require_acceptance()
    with (
        mock.patch.object(dist, "get_world_size", lambda group: 5),
        pytest.raises(RuntimeError, match=r"= \(\d, 5, 0\), expected \(\d, 3, 0\)"),
    ):
        group.require_acceptance()
    assert ring_groups.of((1, 2, 0)) is group  # TransformerEngine caches facts by object
    assert ring_groups.of((2, 0, 1)) is not group
    assert len(distributed_c10d._world.pg_names) == 4  # the job's, the rings', and two rings
    for _ in range(100):  # no rank waits for another one
        RingGroup(comm, (1, 2, 0)).release()
    assert len(distributed_c10d._world.pg_names) == 4
    ring_groups.close()
    assert len(distributed_c10d._world.pg_names) == 2


def test_a_group_is_one_object_per_ring(run_ranks):
    run_ranks(3, look_at_a_group)


def send_alone():
    comm = gloo_comm()
    group = RingGroup(comm, (0, 1))
    other = 1 - dist.get_rank()
    work = dist.isend(torch.zeros(1), other, group)
    with pytest.raises(RuntimeError, match="waited for a send whose other half was not posted"):
        work.wait()
    with pytest.raises(RuntimeError, match="two sends one after the other, expected pairs"):
        dist.isend(torch.zeros(1), other, group)


def test_a_library_that_does_not_pair_is_refused_and_does_not_hang(run_ranks):
    run_ranks(2, send_alone)


def run_with_wrong_pairing(rings):
    """A planted fault: what is received is taken for what is sent."""
    pair = RingGroup._pair

    def swapped(self, kind, tensor, place):
        return pair(self, {"send": "receive", "receive": "send"}[kind], tensor, place)

    with mock.patch.object(RingGroup, "_pair", swapped):
        return run_rings(rings, 1)


def test_a_planted_wrong_pairing_is_seen(run_ranks):
    rings = [(0, 1, 2)]
    results = run_ranks(3, run_with_wrong_pairing, rings)
    assert [arrived for arrived, _ in results] != [expected_of(r, rings, 1) for r in range(3)]


def pass_on_in_rings(rings):
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
    results = run_ranks(5, pass_on_in_rings, rings)
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
    with mock.patch.object(comm.timeline, "marked", wraps=comm.timeline.marked) as marked:
        assert transfer.wait(is_idle) is received and transfer.wait(is_idle) is received
    assert marked.call_count == (is_cuda and not is_idle), "a library waits for each half"
    assert work.waits == (2 if is_cuda else 1)
    assert (comm.timeline.totals_s[RING_WAIT] > 0) == (is_idle or not is_cuda)


def join_or_not():
    refused = pytest.raises(ValueError, match="rank 1 is in none of the lists")
    with refused if dist.get_rank() == 1 else nullcontext():
        new_ring_group([[0]])


def test_every_rank_needs_a_group(run_ranks):
    run_ranks(2, join_or_not)

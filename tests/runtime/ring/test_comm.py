"""Memory that rings send and receive in, by a model of PyTorch's allocator under NCCL.

There the host is many transfers ahead of the device. What NCCL's stream has used and the host has
freed cannot be used again before the device is past all transfers posted until then.
"""

import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_hdp.planner.memory import IN_FLIGHT_BYTES
from megatron_hdp.runtime.kernels import MatmulKernel
from megatron_hdp.runtime.ring import LatentRing, RingAttention, RingComm, TokenLayout, Transfer
from megatron_hdp.runtime.ring import comm as comm_module
from megatron_hdp.runtime.ring.comm import InFlight
from megatron_hdp.runtime.ring.group import RingGroup
from megatron_hdp.runtime.timeline import DEVICE_WAIT, Timeline
from tests.support.ring_cases import gloo_comm

AHEAD = 40


class Allocator:
    """Follows storages that transfers use; the device is `AHEAD` transfers late unless waited for.

    Attributes:
        most: bytes that were free and could not be used, at the worst moment.
        most_under_way: transfers that the device was not past, at most.
    """

    def __init__(self):
        self.posted = self.passed = self.most = self.most_under_way = 0
        self._waiting = {}  # bytes by the transfer that they wait for
        self._followed = weakref.WeakSet()

    def post(self, *tensors):
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage not in self._followed:
                self._followed.add(storage)
                weakref.finalize(storage, self._free, storage.nbytes())
        self.posted += 1
        self.advance(self.posted - AHEAD)
        self.most_under_way = max(self.most_under_way, self.posted - self.passed)
        return Work(self, self.posted)

    def advance(self, passed):
        self.passed = max(self.passed, passed)
        self._waiting = {n: size for n, size in self._waiting.items() if n > self.passed}

    def _free(self, num_bytes):
        if self.posted > self.passed:
            self._waiting[self.posted] = self._waiting.get(self.posted, 0) + num_bytes
        self.most = max(self.most, sum(self._waiting.values()))


class Work:
    def __init__(self, allocator, number):
        self.allocator, self.number = allocator, number

    def wait(self):
        """Only the stream waits."""

    def is_completed(self):
        return self.allocator.passed >= self.number


class LateComm(RingComm):
    """What comes is what was sent, as far as there is room."""

    def __init__(self, group=None):
        super().__init__(group)
        self.allocator = Allocator()

    def trade(self, sent, to, received, of):
        size = min(sent.numel(), received.numel())
        received.view(-1)[:size] = sent.view(-1)[:size]
        return Transfer(self, [self.allocator.post(sent, received)], sent, received)


def attend(comm, chunk, window=None):
    """Forward and backward of our ring."""
    layout = TokenLayout((0, 1, 2, 3), 1, (2 * chunk, 2 * chunk), (6,))
    q, k, v = (torch.ones(layout.num_tokens, 2, 4, requires_grad=True) for _ in range(3))
    RingAttention(MatmulKernel())(q, k, v, layout, comm, 0.5, window=window).sum().backward()


def attend_to_latents(comm, chunk):
    layout = TokenLayout((0, 1, 2, 3), 1, (2 * chunk,), (6,))
    shapes = (layout.num_tokens, 2, 6), (layout.num_tokens, 3), (layout.num_tokens, 2), (20, 3)
    inputs = [torch.ones(shape, requires_grad=True) for shape in shapes]
    LatentRing(MatmulKernel())(*inputs, layout, comm, 0.5).sum().backward()


@pytest.mark.parametrize(
    "layer", [attend, lambda comm, chunk: attend(comm, chunk, 5), attend_to_latents]
)
def test_our_rings_leave_nothing_that_cannot_be_used_again(layer):
    """Layers and micro-batches of all sizes, the largest first: what they free is not NCCL's."""
    comm = LateComm()
    for chunk in (16, 16, 2, 4, 16, 8):
        layer(comm, chunk)
    assert comm.allocator.posted > 10 and comm.allocator.most == 0


def test_a_buffer_grows_and_serves_every_type():
    comm, like = RingComm(None), torch.empty(0)
    first = comm.buffer("one", 8, like)
    assert comm.buffer("one", 4, like, torch.float64).data_ptr() == first.data_ptr()
    assert comm.buffer("other", 8, like).data_ptr() != first.data_ptr()
    grown = comm.buffer("one", 5, like, torch.float64)
    assert (grown.dtype, grown.shape) == (torch.float64, (5,))
    assert comm.buffer("one", 8, like).data_ptr() == grown.data_ptr()


def run_library(num_layers, num_hops, num_values, most_bytes):
    """Body of a rank: hops of a library that allocates what it receives in, as its group sees them.

    Returns what the allocator saw and the kinds of what the host waited for.
    """
    comm = LateComm(gloo_comm().group)
    comm._in_flight = InFlight(comm.timeline, most_bytes)
    group, other = RingGroup(comm, (0, 1)), 1 - dist.get_rank()
    waited = set()

    def sleep(seconds):
        waited.update(kind for kind, _, _ in comm.timeline.current())
        comm.allocator.advance(comm.allocator.passed + 1)

    with mock.patch.object(comm_module.time, "sleep", sleep):
        for _ in range(num_layers):
            sent = torch.zeros(num_values)
            for _ in range(num_hops):
                received = torch.empty_like(sent)
                works = [dist.isend(sent, other, group), dist.irecv(received, other, group)]
                for work in works:
                    work.wait()
                del works, work
                sent = received
    return comm.allocator.most, comm.allocator.most_under_way, waited


def test_what_a_library_allocates_is_bounded(run_ranks):
    """Transfers of 8 KB, of which 64 KB may be under way: 8 instead of 40."""
    (most, under_way, waited), _ = run_ranks(2, run_library, 10, 7, 1000, 64_000)
    assert 0 < most <= 64_000 and under_way <= 9
    assert waited == {DEVICE_WAIT}


def test_two_transfers_may_be_under_way_however_large_they_are():
    """Else the device would wait for the host at each of them."""
    allocator, timeline = Allocator(), Timeline()
    in_flight = InFlight(timeline)
    sleep = mock.Mock(side_effect=lambda seconds: allocator.advance(allocator.passed + 1))
    with mock.patch.object(comm_module.time, "sleep", sleep):
        for _ in range(5):
            in_flight.add([allocator.post(torch.zeros(1))], IN_FLIGHT_BYTES)
    assert sleep.call_count == 3 and allocator.most_under_way == 3

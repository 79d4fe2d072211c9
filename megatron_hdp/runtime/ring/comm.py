"""Point-to-point traffic of the rings: every ring of every micro-batch uses one communicator.

What NCCL does with it (`torch.distributed.batch_isend_irecv`): the transfer waits, on NCCL's own
stream, for what the current stream was given before it was posted; `wait` makes the current stream
wait for the transfer, not the host. What is launched between the two runs beside the transfer.

PyTorch gives memory that NCCL's stream has used to nobody else before that stream is past all that
it was given until the memory was freed. The host is many transfers ahead of it, so what is freed
after every layer adds up to gigabytes. Our rings use the same buffers again and again; whoever
makes new ones waits until few transfers are under way (`InFlight`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_hdp.planner.bounds import group_size
from megatron_hdp.planner.memory import IN_FLIGHT_BYTES
from megatron_hdp.runtime.timeline import DEVICE_WAIT, RING_WAIT, Timeline

_ASK_EVERY_S = 1e-4


class Transfer:
    """What is on its way to ring members while something comes from members.

    Attributes:
        works: handles of torch.distributed.
    """

    def __init__(
        self,
        comm: RingComm,
        works: list[dist.Work],
        sent: Sequence[torch.Tensor],
        received: torch.Tensor,
    ) -> None:
        self._comm = comm
        self.works = works
        self._sent: Sequence[torch.Tensor] = sent  # kept alive until it has left
        self._received = received
        self._is_marked = False

    def wait(self, is_idle: bool = True) -> torch.Tensor:
        """What was received, of several the first.

        Blocks the host, or only the current CUDA stream, until it is there.

        May be called again: each time the stream that is current then waits.

        Args:
            is_idle: a GPU computes nothing meanwhile, so that the wait counts as lost time. A CPU
                never does.
        """
        if self.works:
            timeline = self._comm.timeline
            if is_idle or not self._received.is_cuda:
                with timeline.span(RING_WAIT):
                    self._wait()
            elif self._is_marked:
                self._wait()
            else:
                self._is_marked = True
                with timeline.marked(RING_WAIT):
                    self._wait()
        if not self._received.is_cuda:
            self.works = []  # gloo's works would wait for ever a second time
        self._sent = ()
        return self._received

    def _wait(self) -> None:
        for work in self.works:
            try:
                work.wait()
            except RuntimeError as error:
                raise RuntimeError(f"a ring member did not answer: {error}") from error


class InFlight:
    """Bounds the bytes of transfers that the device is not past; the host waits for the oldest.

    That blocks no ring. Whoever posts a transfer has let its stream wait for those before the last
    one, so a host that stands still until they have passed holds back nothing that could run
    earlier; the device of each rank comes to them in the one order of all rings.
    """

    def __init__(self, timeline: Timeline, most_bytes: int = IN_FLIGHT_BYTES) -> None:
        self._timeline, self._most_bytes = timeline, most_bytes
        self._transfers: deque[tuple[list[dist.Work], int]] = deque()
        self._num_bytes = 0

    def add(self, works: list[dist.Work], num_bytes: int) -> None:
        """Notes what was just posted; two transfers may always be under way."""
        self._transfers.append((works, num_bytes))
        self._num_bytes += num_bytes
        while self._num_bytes > self._most_bytes and len(self._transfers) > 2:
            oldest, its_bytes = self._transfers.popleft()
            self._num_bytes -= its_bytes
            if not all(work.is_completed() for work in oldest):
                with self._timeline.noted(DEVICE_WAIT):
                    while not all(work.is_completed() for work in oldest):
                        time.sleep(_ASK_EVERY_S)


class RingComm:
    """Sends around rings of HDP ranks over one communicator and counts bytes.

    Attributes:
        group: communicator over all HDP ranks.
        ranks_per_node: HDP ranks of a node where rings over nodes are double; 0: they are plain.
        timeline: where waiting for ring members is noted.
        bytes_sent: bytes this rank sent around rings; whoever reads it may set it to 0.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        timeline: Timeline | None = None,
        ranks_per_node: int = 0,
    ) -> None:
        self.group = group
        self.ranks_per_node = ranks_per_node
        self.timeline = timeline or Timeline()
        self.bytes_sent = 0
        self._in_flight = InFlight(self.timeline)
        self._buffers: dict[str, torch.Tensor] = {}

    def buffer(
        self, name: str, num_values: int, like: torch.Tensor, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Flat memory to send from or to receive in, on the device of `like`, which is kept.

        A later call of this name gives the same memory, so a caller may use it until its last
        transfer has been waited for, and hands it to nobody, autograd included. What the later one
        launches comes after that on the stream that computes, and NCCL's stream waits for that one.
        """
        dtype = dtype or like.dtype
        num_bytes = num_values * dtype.itemsize
        found = self._buffers.get(name)
        if found is None or found.numel() < num_bytes or found.device != like.device:
            found = torch.empty(num_bytes, dtype=torch.uint8, device=like.device)
            self._buffers[name] = found
        return found[:num_bytes].view(dtype)

    def group_size(self, ring: tuple[int, ...]) -> int:
        """Members m of the groups of a double ring (`double_ring`); 0: it runs as a plain one."""
        if not self.ranks_per_node:
            return 0
        size = group_size(ring, self.ranks_per_node)
        return size if 1 < size < len(ring) else 0

    def pass_on(
        self,
        tensor: torch.Tensor,
        ring: tuple[int, ...],
        index: int,
        into: torch.Tensor | None = None,
    ) -> Transfer:
        """Starts sending `tensor` to the next member and receiving its like from the previous one.

        Every member of the ring makes the same calls in the same order, so between any two ranks
        messages match by their order. `tensor` must be contiguous and stay unchanged until `wait`.
        What comes is written to `into`, or to a new tensor.
        """
        following, previous = ring[(index + 1) % len(ring)], ring[index - 1]
        received = torch.empty_like(tensor) if into is None else into
        return self.exchange(tensor, following, received, previous)

    def exchange(
        self, sent: torch.Tensor, following: int, received: torch.Tensor, previous: int
    ) -> Transfer:
        """Starts sending to one HDP rank and receiving from another, as one operation of NCCL."""
        return self.trade(sent, ((following, len(sent)),), received, ((previous, len(received)),))

    def exchange_new(
        self, sent: torch.Tensor, following: int, received: torch.Tensor, previous: int
    ) -> Transfer:
        """`exchange` of tensors that are no `buffer`: at most `IN_FLIGHT_BYTES` are under way."""
        transfer = self.exchange(sent, following, received, previous)
        self._in_flight.add(transfer.works, sent.nbytes + received.nbytes)
        return transfer

    def trade(
        self,
        sent: torch.Tensor,
        to: Sequence[tuple[int, int]],
        received: torch.Tensor,
        of: Sequence[tuple[int, int]],
    ) -> Transfer:
        """Starts sending to some HDP ranks and receiving from some, as one operation of NCCL.

        Args:
            sent: contiguous; must stay unchanged until `wait`.
            to: who gets them, with how many rows, in their order; each rank once.
            received: contiguous.
            of: likewise, who sends them.
        """
        sends, receives = (
            [(tensor, peers[0][0])]  # as in every hop
            if len(peers) == 1
            else list(zip(tensor.split([n for _, n in peers]), (p for p, _ in peers), strict=True))
            for tensor, peers in ((sent, to), (received, of))
        )
        return self._post(sends, receives, received)

    def start(
        self,
        sends: Sequence[tuple[torch.Tensor, int]],
        receives: Sequence[tuple[torch.Tensor, int]],
    ) -> Transfer:
        """Starts sending tensors to HDP ranks and receiving from some, as one operation of NCCL."""
        return self._post(sends, receives, receives[0][0])

    def _post(
        self,
        sends: Sequence[tuple[torch.Tensor, int]],
        receives: Sequence[tuple[torch.Tensor, int]],
        received: torch.Tensor,
    ) -> Transfer:
        operations = [
            dist.P2POp(operation, tensor, None, self.group, 0, peer)
            for operation, pairs in ((dist.isend, sends), (dist.irecv, receives))
            for tensor, peer in pairs
        ]
        works = dist.batch_isend_irecv(operations) if operations else []
        sent = [tensor for tensor, _ in sends]
        self.bytes_sent += sum(tensor.nbytes for tensor in sent)
        return Transfer(self, works, sent, received)

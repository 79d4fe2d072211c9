"""Point-to-point traffic of the rings: every ring of every micro-batch uses one communicator.

What NCCL does with it (`torch.distributed.batch_isend_irecv`): the transfer waits, on NCCL's own
stream, for what the current stream was given before it was posted; `wait` makes the current stream
wait for the transfer, not the host. What is launched between the two runs beside the transfer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_hdp.runtime.timeline import RING_WAIT, Timeline


class Transfer:
    """One tensor on its way to a ring member while another comes from a member."""

    def __init__(
        self, comm: RingComm, works: list[dist.Work], sent: torch.Tensor, received: torch.Tensor
    ) -> None:
        self._comm = comm
        self._works = works
        self._sent: torch.Tensor | None = sent  # kept alive until it has left
        self._received = received

    def wait(self, is_idle: bool = True) -> torch.Tensor:
        """What was received; blocks the host, or only the current CUDA stream, until it is there.

        May be called again: each time the stream that is current then waits.

        Args:
            is_idle: a GPU computes nothing meanwhile, so that the wait counts as lost time. A CPU
                never does.
        """
        if self._works:
            timeline, timed = self._comm.timeline, is_idle or not self._received.is_cuda
            with timeline.span(RING_WAIT) if timed else timeline.marked(RING_WAIT):
                for work in self._works:
                    try:
                        work.wait()
                    except RuntimeError as error:
                        raise RuntimeError(f"a ring member did not answer: {error}") from error
        if not self._received.is_cuda:
            self._works = []  # gloo's works would wait for ever a second time
        self._sent = None
        return self._received


class RingComm:
    """Sends around rings of HDP ranks over one communicator and counts bytes.

    Attributes:
        group: communicator over all HDP ranks.
        timeline: where waiting for ring members is noted.
        bytes_sent: bytes this rank sent around rings; whoever reads it may set it to 0.
    """

    def __init__(self, group: dist.ProcessGroup, timeline: Timeline | None = None) -> None:
        self.group = group
        self.timeline = timeline or Timeline()
        self.bytes_sent = 0

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
        return self.trade(sent, [(following, len(sent))], received, [(previous, len(received))])

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
        operations = []
        for operation, tensor, peers in ((dist.isend, sent, to), (dist.irecv, received, of)):
            parts = tensor.split([rows for _, rows in peers])
            operations += [
                dist.P2POp(operation, part, group=self.group, group_peer=peer)
                for part, (peer, _) in zip(parts, peers, strict=True)
            ]
        works = dist.batch_isend_irecv(operations) if operations else []
        self.bytes_sent += sent.numel() * sent.element_size()
        return Transfer(self, works, sent, received)

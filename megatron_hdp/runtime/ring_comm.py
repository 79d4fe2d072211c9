"""Point-to-point traffic of the rings: every ring of every micro-batch uses one communicator."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_hdp.runtime.timeline import RING_WAIT, Timeline


def new_ring_group(
    rank_lists: Sequence[Sequence[int]], timeout: timedelta | None = None
) -> dist.ProcessGroup:
    """The communicator of the rings, one for each list of HDP ranks; returns the caller's own.

    It is separate from the group that carries gradient sync, because a rank that has finished its
    micro-batches starts reducing while others still run rings. Every rank of the job must call this
    with the same lists.
    """
    mine = None
    for ranks in rank_lists:
        group = dist.new_group(list(ranks), timeout=timeout)
        if dist.get_rank() in ranks:
            mine = group
    if mine is None:
        raise ValueError(f"rank {dist.get_rank()} is in none of the lists {list(rank_lists)}")
    return mine


class Transfer:
    """One tensor on its way to the next ring member while another comes from the previous one."""

    def __init__(
        self, comm: RingComm, works: list[dist.Work], sent: torch.Tensor, received: torch.Tensor
    ) -> None:
        self._comm = comm
        self._works = works
        self._sent: torch.Tensor | None = sent  # kept alive until it has left
        self._received = received

    def wait(self) -> torch.Tensor:
        """What the previous member sent; blocks until both directions are done."""
        with self._comm.timeline.span(RING_WAIT):
            while self._works:
                work = self._works.pop()
                try:
                    work.wait()
                except RuntimeError as error:
                    raise RuntimeError(f"a ring member did not answer: {error}") from error
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

    def pass_on(self, tensor: torch.Tensor, ring: tuple[int, ...], index: int) -> Transfer:
        """Starts sending `tensor` to the next member and receiving its like from the previous one.

        Every member of the ring makes the same calls in the same order, so between any two ranks
        messages match by their order. `tensor` must be contiguous and stay unchanged until `wait`.
        """
        received = torch.empty_like(tensor)
        following, previous = ring[(index + 1) % len(ring)], ring[index - 1]
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, group=self.group, group_peer=following),
                dist.P2POp(dist.irecv, received, group=self.group, group_peer=previous),
            ]
        )
        self.bytes_sent += tensor.numel() * tensor.element_size()
        return Transfer(self, works, tensor, received)

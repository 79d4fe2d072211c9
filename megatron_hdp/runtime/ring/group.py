"""A process group for one ring that owns no communicator: it sends over the HDP communicator.

Libraries that run rings by themselves (TransformerEngine) want a `torch.distributed` group of the
ring's members. A communicator per ring would cost hundreds of MB of GPU memory each and a call that
every rank of the job must enter. This object only says who is in the ring and translates its sends
and receives; making one is local and takes microseconds.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_hdp.runtime.ring.comm import RingComm, Transfer


class RingGroup(dist.ProcessGroup):
    """The members of one ring, in ring order; ranks of this group are places in the ring.

    Members must send to one neighbour and receive from the other in pairs, in either order, as
    every ring does: a pair leaves as one operation of NCCL, which is free of deadlock and uses the
    communicator there is. An unpaired one would make NCCL build a communicator of its own.

    Attributes:
        members: the ranks of the job, in ring order.
    """

    def __init__(self, comm: RingComm, ring: tuple[int, ...]) -> None:
        everyone = dist.get_process_group_ranks(comm.group)
        self.members = [everyone[rank] for rank in ring]
        super().__init__(ring.index(dist.get_rank(comm.group)), len(ring))
        self._comm = comm
        self._ring = ring
        self._index = ring.index(dist.get_rank(comm.group))
        self._first: tuple[str, torch.Tensor, int, HalfOfPair] | None = None
        # what the functions of torch.distributed look up of a group; new_group does the same
        world = distributed_c10d._world
        world.pg_group_ranks[self] = {rank: place for place, rank in enumerate(self.members)}
        world.pg_map[self] = world.pg_map[comm.group]
        world.pg_names[self] = "hdp_ring_" + "_".join(map(str, self.members))

    def size(self) -> int:
        """Members of the ring."""
        return len(self._ring)

    def rank(self) -> int:
        """This rank's place in the ring."""
        return self._index

    def name(self) -> str:
        """The kind of group."""
        return "hdp_ring"

    def getBackendName(self) -> str:  # noqa: D102  torch's name
        return self.name()

    def send(self, tensors: list[torch.Tensor], dstRank: int, tag: int = 0) -> HalfOfPair:
        """Half of a pair: to the member at place `dstRank`."""
        return self._pair("send", tensors[0], dstRank)

    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int = 0) -> HalfOfPair:
        """Half of a pair: from the member at place `srcRank`."""
        return self._pair("receive", tensors[0], srcRank)

    def require_acceptance(self) -> None:
        """Asks torch.distributed what it takes this group for; communicates nothing.

        Raises:
            RuntimeError: not for the ring that it stands for; another torch may keep other tables.
        """
        expected = self.members.index(dist.get_rank()), self.size(), 0
        first = dist.P2POp(dist.isend, torch.zeros(1), self.members[0], self)
        found = dist.get_rank(self), dist.get_world_size(self), first.group_peer
        if found != expected:
            raise RuntimeError(
                f"torch {torch.__version__} takes the group of ring {self.members} for (own place, "
                f"size, place of its first member) = {found}, expected {expected}"
            )

    def release(self) -> None:
        """Takes the group out of torch.distributed's tables."""
        world = distributed_c10d._world
        for table in (world.pg_group_ranks, world.pg_map, world.pg_names):
            table.pop(self, None)

    def _pair(self, kind: str, tensor: torch.Tensor, place: int) -> HalfOfPair:
        half = HalfOfPair(kind)
        if self._first is None:
            self._first = (kind, tensor, place, half)
            return half
        (other_kind, other, other_place, other_half), self._first = self._first, None
        if other_kind == kind:
            raise RuntimeError(
                f"the group of ring {self._ring} was given two {kind}s one after the other, "
                "expected pairs of a send and a receive: this library's ring is not supported"
            )
        sent, following, received, previous = (
            (tensor, place, other, other_place)
            if kind == "send"
            else (other, other_place, tensor, place)
        )
        ring = self._ring
        transfer = self._comm.exchange_new(sent, ring[following], received, ring[previous])
        half.transfer = other_half.transfer = transfer
        return half


class RingGroups:
    """The groups of one communicator's rings: the same object for a ring, every time.

    Libraries remember facts of a group by its object. A group takes about 2 KB and is kept until
    `close`, since a backward pass may still need it: 50 MB after 25,000 different rings.
    """

    def __init__(self, comm: RingComm) -> None:
        self.comm = comm
        self._groups: dict[tuple[int, ...], RingGroup] = {}

    def of(self, ring: tuple[int, ...]) -> RingGroup:
        """The group of a ring: HDP ranks in ring order, this rank among them."""
        found = self._groups.get(ring)
        if found is None:
            found = self._groups[ring] = RingGroup(self.comm, ring)
        return found

    def close(self) -> None:
        """Forgets the groups; none of them may be used any more."""
        for group in self._groups.values():
            group.release()
        self._groups.clear()


class HalfOfPair:
    """The handle of one half; both wait for the whole pair, any number of times."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self.transfer: Transfer | None = None

    def wait(self, timeout: object = None) -> bool:
        """Like `Transfer.wait`; the communicator's own timeout applies.

        On a GPU the time is not counted: such libraries compute on another stream meanwhile.
        """
        if self.transfer is None:
            raise RuntimeError(f"waited for a {self._kind} whose other half was not posted yet")
        self.transfer.wait(is_idle=False)
        return True

"""A ring that uses the links of all members of a node: Double-Ring-Attention.

What it takes: `planner.bounds`.

The D members are M groups of m neighbours, each group in one node; member ``l`` of group ``n`` has
place ``n m + l``. In the first of M rounds what the members of a group hold goes around in their
group, m - 1 hops. Meanwhile each sends what it began the round with, in m pieces, one a step, to
member ``l`` of the next group, where it goes around in the next round. So every member meets all
others in D - 1 hops, as in a plain ring, and between nodes each hop carries an m-th.

What is found for a block follows it one hop behind, within the round. It is not taken back after
a round: what a round found for the block of member ``l + 1`` ends at member ``l``, and so does what
the next group finds for it, where both are joined. Sums go on to the next group a round later,
again in pieces, and from the last one home. That last hop comes when nothing is left to compute and
carries all at once: the planner's `home_s`.

All members run the same steps, and in each send to the places after them and receive from those
before, as one operation. So in the earliest unfinished step every member is there, or on its way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron_hdp.runtime.ring.comm import RingComm, Transfer
from megatron_hdp.runtime.ring.layout import TokenLayout
from megatron_hdp.runtime.ring.message import (
    Field,
    Finding,
    Found,
    Passing,
    Tensors,
    apart,
    buffers,
    fill,
    put,
)

_ALIGNMENT = 256
"""Bytes at whose multiples pieces begin."""


@dataclass(frozen=True)
class Groups:
    """The ring seen from one member: m members a group, of which it is one.

    Args:
        layout: of the ring.
        comm: of the rings.
        size: m; divides the ring's members and is neither 1 nor all of them.
    """

    layout: TokenLayout
    comm: RingComm
    size: int

    @property
    def number(self) -> int:
        """M."""
        return self.layout.degree // self.size

    def peer(self, groups: int, places: int) -> int:
        """The HDP rank so many groups, and places in a group, after us."""
        group, place = divmod(self.layout.index, self.size)
        group, place = (group + groups) % self.number, (place + places) % self.size
        return self.layout.ring[group * self.size + place]

    def distance(self, groups: int, places: int) -> int:
        """How many places before us that member of the ring is which is so many groups before."""
        place = self.layout.index % self.size
        before = place - (place - places) % self.size
        return (groups * self.size + before) % self.layout.degree

    def start(
        self,
        step: int,
        within: tuple[torch.Tensor, torch.Tensor] | None,
        across: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> Transfer | None:
        """Starts what leaves at a step: a message within the group, a piece of one to the next.

        Args:
            step: of the round: which piece.
            within: what leaves, and where what comes is written; None: nothing.
            across: likewise.
        """
        sends, receives = [], []
        if within is not None:
            sends.append((within[0], self.peer(0, 1)))
            receives.append((within[1], self.peer(0, -1)))
        if across is not None:
            sent, received = (self._piece(message, step) for message in across)
            if sent.numel():
                sends.append((sent, self.peer(1, 0)))
                receives.append((received, self.peer(-1, 0)))
        return self.comm.start(sends, receives) if sends else None

    def _piece(self, message: torch.Tensor, step: int) -> torch.Tensor:
        """The piece of a message that travels at a step."""
        size = -(-message.numel() // (self.size * _ALIGNMENT)) * _ALIGNMENT
        return message[step * size : (step + 1) * size]


def travelling_in_groups(tensors: Tensors, groups: Groups) -> Passing:
    """`travelling.travelling`, group by group."""
    fields = [Field(one.shape, one.dtype) for one in tensors]
    names = "travelling", "spare travelling", "in the group", "spare in the group"
    first, coming, *rooms = buffers(groups.comm, fields, tensors[0], *names)
    put(first, fields, tensors)
    for round_ in range(groups.number):
        here = first
        across = (first, coming) if round_ + 1 < groups.number else None
        for step in range(groups.size):
            room = rooms[step % 2]
            within = (here, room) if step + 1 < groups.size else None
            transfer = groups.start(step, within, across)
            yield groups.distance(round_, step), apart(here, fields)
            if transfer is not None:
                transfer.wait()
            here = room
        first, coming = coming, first


def found_in_groups(
    blocks: Passing, found: Found, groups: Groups, find: Finding, like: torch.Tensor
) -> list[torch.Tensor]:
    """`travelling.found_by_others`, of the blocks of `travelling_in_groups` behind our own."""
    names = "found", "spare found", "found in our group", "found in groups", "spare in groups"
    here, spare, room, coming, more = buffers(groups.comm, found.fields, like, *names)
    totals: list[torch.Tensor] = []
    fill(here, found)
    arriving = None
    for _ in range(groups.size - 1):  # behind our own, and back to us
        here, spare = _add_next(blocks, found.fields, find, here, spare, arriving)
        arriving = groups.start(0, (here, spare), None)
    assert arriving is not None, "a group has at least two members"
    arriving.wait()
    in_our_group, spare = spare, room
    for round_ in range(1, groups.number):
        across = (totals[0], coming) if totals else None
        fill(here, found)
        arriving, beside = None, groups.start(0, None, across)
        for step in range(groups.size):
            here, spare = _add_next(blocks, found.fields, find, here, spare, arriving)
            if beside is not None:
                beside.wait()
                beside = None
            if step + 1 < groups.size:
                arriving = groups.start(step + 1, (here, spare), across)
        if round_ == 1:
            totals, here = [here], more
        else:
            found.join(apart(coming, found.fields), apart(here, found.fields))
            totals, coming = [coming], totals[0]
    home = groups.comm.exchange(totals[0], groups.peer(1, 1), coming, groups.peer(-1, -1)).wait()
    result = apart(home, found.fields)
    found.join(result, apart(in_our_group, found.fields))
    return result


def _add_next(
    blocks: Iterator[tuple[int, list[torch.Tensor]]],
    fields: Sequence[Field],
    find: Finding,
    here: torch.Tensor,
    spare: torch.Tensor,
    arriving: Transfer | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds what is found for the next block to what was found before; where that lies now."""
    add = find(*next(blocks))
    if arriving is not None:
        arriving.wait()
        here, spare = spare, here
    add(apart(here, fields))
    return here, spare

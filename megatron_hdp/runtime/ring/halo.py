"""Keys and values that come before a rank's chunks, as far as a window reaches: its halo.

A ring's member ``j`` of ``D`` holds the chunks ``j`` and ``2D-1-j`` of every sequence. In a window
of ``w`` tokens a chunk's queries see the ``w - 1`` tokens before it (or all that there are), mostly
a part of the one chunk before. They come in hops: in the first a chunk's owner gets the last tokens
of the chunk before, in the next those of the chunk before that, which the sender has just got. So
chunks form a line, ``0`` to ``2D-1``, along which keys and values move by one chunk a hop; it runs
up the ring by the members' head chunks and down again by their tail chunks::

    member      0      1     ...    D-1
    heads       0  ->  1  ->  ..  -> D-1
                                      |     (the same rank: a copy)
    tails     2D-1 <- 2D-2 <- ..  <-  D

Gradients go the same way back, hop by hop, each member adding its own before it passes them on.

**Order.** All members make the same hops, one after the other. In a hop ``j`` sends to ``j + 1``
what its head chunk knows and to ``j - 1`` what its tail chunk knows, if there is such a member: at
most one message each way between two ranks, all of a rank's posted together, so nothing waits in a
circle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from megatron_hdp.planner.slices import chunks_of
from megatron_hdp.runtime.host_to_device import to_device
from megatron_hdp.runtime.kernels import Segments
from megatron_hdp.runtime.ring.comm import RingComm, Transfer
from megatron_hdp.runtime.ring.layout import Rows, TokenLayout


@dataclass(frozen=True, eq=False)
class _Hop:
    """Rows of the keys and values, halo included, that move in one hop."""

    sent: Rows
    to: tuple[tuple[int, int], ...]
    """HDP ranks that get them, in their order, and how many rows each."""
    received: Rows
    of: tuple[tuple[int, int], ...]
    """Likewise, whose they are."""
    copied: tuple[Rows, Rows] | None
    """From where to where, on the member whose chunks follow one another."""


@dataclass(frozen=True, eq=False)
class Halo:
    """A micro-batch's halo on one rank, for one window.

    Keys and values are packed by segment: of every chunk of a ring sequence, then of every local
    sequence, first the halo and then the tokens themselves.
    """

    q_segments: Segments
    """Chunks of ring sequences (head and tail apart), then local sequences."""
    k_segments: Segments
    """The same with what comes before."""
    own: Rows
    """Where this rank's own tokens are among the keys."""
    hops: tuple[_Hop, ...]

    @classmethod
    def of(cls, layout: TokenLayout, window: int) -> Halo:
        """The halo of queries that see `window` tokens, themselves included."""
        found = layout.halos.get(window)
        if found is None:
            found = layout.halos[window] = _Builder(layout, window).build()
        assert isinstance(found, cls)
        return found

    def with_halo(
        self, k: torch.Tensor, v: torch.Tensor, comm: RingComm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[t, kv_heads, d]`` with those before them, as `k_segments` says."""
        if not self.hops:
            return k, v
        kv = k.new_empty((sum(self.k_segments.lengths), 2, *k.shape[1:]))
        kv[self.own] = torch.stack((k, v), dim=1)
        for hop in self.hops:
            transfer = _trade(comm, kv, hop.sent, hop.to, hop.of)
            if hop.copied is not None:
                known, new = hop.copied
                kv[new] = kv[known]
            kv[hop.received] = transfer.wait()
        keys, values = kv.unbind(1)
        return keys, values

    def home(
        self, dk: torch.Tensor, dv: torch.Tensor, comm: RingComm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of this rank's own keys and values, from those of `with_halo`'s."""
        if not self.hops:
            return dk, dv
        wide = torch.promote_types(dk.dtype, torch.float32)
        dkv = torch.stack((dk, dv), dim=1).to(wide)
        for hop in self.hops[::-1]:
            transfer = _trade(comm, dkv, hop.received, hop.of, hop.to)
            if hop.copied is not None:
                known, new = hop.copied
                dkv[known] += dkv[new]
            dkv[hop.sent] += transfer.wait()
        dk, dv = dkv[self.own].to(dk.dtype).unbind(1)
        return dk, dv


def _trade(
    comm: RingComm,
    kv: torch.Tensor,
    rows: Rows,
    to: tuple[tuple[int, int], ...],
    of: tuple[tuple[int, int], ...],
) -> Transfer:
    """Sends these rows of `kv`; what comes lies in a buffer until the next hop."""
    shape, row = kv.shape[1:], kv[0].numel()
    sent, arriving = (
        comm.buffer(name, sum(n for _, n in peers) * row, kv).view(-1, *shape)
        for name, peers in (("halo", to), ("arriving halo", of))
    )
    sent.copy_(kv[rows])
    return comm.trade(sent, to, arriving, of)


class _Builder:
    """Counts the rows of every hop."""

    def __init__(self, layout: TokenLayout, window: int) -> None:
        self._layout, self._before = layout, window - 1
        degree = layout.degree
        self._lanes = chunks_of(layout.index, degree)
        chunks = [half for half in layout.half_slices for _ in self._lanes]
        places = [place for _ in layout.half_slices for place in self._lanes]
        reach = [min(self._before, place * n) for place, n in zip(places, chunks, strict=True)]
        self._tokens = (*chunks, *layout.local_lengths)
        reaches = [*reach, *[0] * len(layout.local_lengths)]
        self._lengths = tuple(map(sum, zip(self._tokens, reaches, strict=True)))
        self._ends = list(accumulate(self._lengths))
        self._last = 2 * degree - 1

    def build(self) -> Halo:
        layout = self._layout
        shortest = min(layout.half_slices, default=0)
        num_hops = min(-(-self._before // shortest), self._last) if shortest else 0
        own = [(end - n, end) for end, n in zip(self._ends, self._tokens, strict=True)]
        return Halo(
            Segments.of(self._tokens, layout.device),
            Segments.of(self._lengths, layout.device),
            _rows(own, layout.device),
            tuple(self._hop(number) for number in range(1, num_hops + 1)),
        )

    def _hop(self, number: int) -> _Hop:
        ring, index, device = self._layout.ring, self._layout.index, self._layout.device
        heads, tails = (self._pieces(lane, number - 1, number) for lane in (0, 1))
        new_heads, new_tails = (self._pieces(lane, number, number) for lane in (0, 1))
        sent, to, received, of = [], [], [], []
        copied = None
        if index + 1 < len(ring):
            after = ring[index + 1]
            sent.append(heads)
            to.append((after, _length(heads)))
            received.append(new_tails)
            of.append((after, _length(new_tails)))
        else:
            copied = _rows(heads, device), _rows(new_tails, device)
        if index > 0:
            before = ring[index - 1]
            sent.append(tails)
            to.append((before, _length(tails)))
            received.append(new_heads)
            of.append((before, _length(new_heads)))
        return _Hop(
            _rows(sum(sent, []), device),
            tuple(one for one in to if one[1]),
            _rows(sum(received, []), device),
            tuple(one for one in of if one[1]),
            copied,
        )

    def _pieces(self, lane: int, distance: int, hop: int) -> list[tuple[int, int]]:
        """Rows of what comes `distance` chunks before this one, as far as `hop` moves them."""
        pieces, place = [], self._lanes[lane]
        if place - distance < 0 or place - distance + hop > self._last:
            return []  # there is no such chunk, or none that it goes to
        for end, chunk in zip(self._ends[lane::2], self._layout.half_slices, strict=False):
            length = max(0, min(chunk, self._before - (hop - 1) * chunk))
            stop = end - distance * chunk
            if length:
                pieces.append((stop - length, stop))
        return pieces


def _length(pieces: Sequence[tuple[int, int]]) -> int:
    return sum(stop - first for first, stop in pieces)


def _rows(pieces: Sequence[tuple[int, int]], device: torch.device) -> Rows:
    """These rows, in this order."""
    if len(pieces) <= 1:
        return slice(*(pieces[0] if pieces else (0, 0)))
    return to_device(torch.cat([torch.arange(*piece) for piece in pieces]), device)

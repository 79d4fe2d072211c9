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

**Parts.** The first chunk of a part follows the last one of the part before, on the same rank:
member 0, which keeps the last ``w - 1`` tokens of a part for the next one, halo included. They are
that chunk's halo, and move on from there like a chunk of that length. A part sends nothing else.

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
from megatron_hdp.runtime.ring.parts import LOCAL, RING, EarlierKeys, PartLayout, Stretch
from megatron_hdp.runtime.ring.travelling import wide_type


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
    before: tuple[tuple[Stretch, slice], ...] = ()
    """What earlier parts keep here for this one, and its rows among the keys."""
    kept: tuple[tuple[Stretch, slice], ...] = ()
    """Likewise, what is kept here for the next part."""

    @classmethod
    def of(cls, layout: TokenLayout, window: int) -> Halo:
        """The halo of queries that see `window` tokens, themselves included."""
        found = layout.halos.get(window)
        if found is None:
            found = layout.halos[window] = _Builder(layout, window).build()
        assert isinstance(found, cls)
        return found

    def with_halo(
        self, k: torch.Tensor, v: torch.Tensor, comm: RingComm, earlier: EarlierKeys | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[t, kv_heads, d]`` with those before them, as `k_segments` says."""
        if not self.hops and not self.before and not self.kept:
            return k, v
        kv = k.new_empty((sum(self.k_segments.lengths), 2, *k.shape[1:]))
        kv[self.own] = torch.stack((k, v), dim=1)
        for stretch, rows in self.before:
            (kv[rows],) = _of_parts(earlier).of(stretch)
        for hop in self.hops:
            transfer = _trade(comm, kv, hop.sent, hop.to, hop.of)
            if hop.copied is not None:
                known, new = hop.copied
                kv[new] = kv[known]
            kv[hop.received] = transfer.wait()
        for stretch, rows in self.kept:
            _of_parts(earlier).put(stretch, kv[rows])
        keys, values = kv.unbind(1)
        return keys, values

    def home(
        self, dk: torch.Tensor, dv: torch.Tensor, comm: RingComm, earlier: EarlierKeys | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of this rank's own keys and values, from those of `with_halo`'s."""
        if not self.hops and not self.before and not self.kept:
            return dk, dv
        dkv = torch.stack((dk, dv), dim=1).to(wide_type(dk))
        for stretch, rows in self.kept:
            dkv[rows] += _of_parts(earlier).take(stretch)[0]
        for hop in self.hops[::-1]:
            transfer = _trade(comm, dkv, hop.received, hop.of, hop.to)
            if hop.copied is not None:
                known, new = hop.copied
                dkv[known] += dkv[new]
            dkv[hop.sent] += transfer.wait()
        for stretch, rows in self.before:
            _of_parts(earlier).add(stretch, dkv[rows])
        dk, dv = dkv[self.own].to(dk.dtype).unbind(1)
        return dk, dv


def _of_parts(earlier: EarlierKeys | None) -> EarlierKeys:
    assert earlier is not None, "a part sees keys of others"
    return earlier


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
        self._layout, self._reach = layout, window - 1
        self._lanes = chunks_of(layout.index, layout.degree)
        self._last = 2 * layout.degree - 1
        self._of_parts = self._reaching_into_parts()
        num_rings = len(layout.ring_slices)
        # of each ring sequence, of each local one: tokens before it in other parts, within reach
        in_ring, alone = (
            [self._of_parts.get(kind, 0), *[0] * number][:number]
            for kind, number in ((RING, num_rings), (LOCAL, len(layout.local_lengths)))
        )
        self._earlier = in_ring
        reaches = [
            min(self._reach, earlier + place * chunk)
            for chunk, earlier in zip(layout.half_slices, in_ring, strict=True)
            for place in self._lanes
        ]
        chunks = [half for half in layout.half_slices for _ in self._lanes]
        self._tokens = (*chunks, *layout.local_lengths)
        self._lengths = tuple(map(sum, zip(self._tokens, [*reaches, *alone], strict=True)))
        self._ends = list(accumulate(self._lengths))

    def _reaching_into_parts(self) -> dict[str, int]:
        """Tokens that earlier parts have of what continues, as far as the window reaches."""
        if not isinstance(self._layout, PartLayout):
            return {}
        return {
            kind: min(self._reach, stretch.stop * (self._layout.degree if kind == RING else 1))
            for kind, stretch in self._layout.earlier.items()
        }

    def build(self) -> Halo:
        layout = self._layout
        shortest = min(layout.half_slices, default=0)
        farthest = self._last + any(self._earlier)
        num_hops = min(-(-self._reach // shortest), farthest) if shortest else 0
        own = [(end - n, end) for end, n in zip(self._ends, self._tokens, strict=True)]
        return Halo(
            Segments.of(self._tokens, layout.device),
            Segments.of(self._lengths, layout.device),
            _rows(own, layout.device),
            tuple(self._hop(number) for number in range(1, num_hops + 1)),
            *self._between_parts(),
        )

    def _between_parts(self) -> tuple[tuple[tuple[Stretch, slice], ...], ...]:
        """`Halo.before` and `Halo.kept`: of a ring on member 0, whose chunks are first and last."""
        layout = self._layout
        if not isinstance(layout, PartLayout):
            return (), ()
        num_chunks = 2 * len(layout.ring_slices)
        before, kept = [], []
        for kind, first, last in (
            (RING, 0, num_chunks - 1),
            (LOCAL, num_chunks, len(self._tokens) - 1 - bool(layout.padding)),
        ):
            if kind == RING and layout.index > 0:
                continue
            tokens = self._of_parts.get(kind, 0)
            if tokens:
                begin = self._ends[first] - self._lengths[first]
                before.append((layout.earlier[kind].last(tokens), slice(begin, begin + tokens)))
            if kind in layout.kept and self._reach:
                stretch, end = layout.kept[kind], self._ends[last]
                so_far = stretch.stop * (layout.degree if kind == RING else 1)
                tokens = min(self._reach, so_far)
                kept.append((stretch.last(tokens), slice(end - tokens, end)))
        return tuple(before), tuple(kept)

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
        pieces, place = [], self._lanes[lane] - distance
        if place + hop > self._last:
            return []  # there is no chunk that it goes to
        for end, chunk, earlier in zip(
            self._ends[lane::2], self._layout.half_slices, self._earlier, strict=False
        ):
            there = chunk if place >= 0 else earlier if place == -1 else 0
            length = max(0, min(there, self._reach - (hop - 1) * chunk))
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

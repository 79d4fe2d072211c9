"""Attention of a micro-batch that runs in parts: a part's queries also see keys of earlier parts.

A part is a packed layout of its own. Of a sequence that began in an earlier part, keys and values
stay on the rank that made them (`EarlierKeys`); those of a ring's sequence go around the ring once
more for each part that sees them. Backward runs from the last part to the first: what a part finds
for the keys of earlier ones is added up where they stay, until the backward of their own part takes
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from megatron_hdp.runtime.kernels import AttentionKernel, Block, Forward, Segments
from megatron_hdp.runtime.ring.comm import RingComm
from megatron_hdp.runtime.ring.layout import TokenLayout
from megatron_hdp.runtime.ring.travelling import (
    Found,
    Passing,
    accumulator,
    gradients_of_travelling,
    merge,
    travelling_kv,
)

RING, LOCAL = "ring", "local"
_ALL = slice(None)


class Held(NamedTuple):
    """Tokens of a sequence that an earlier part holds on this rank."""

    part: int
    num_tokens: int


@dataclass(frozen=True, eq=False)
class PartLayout(TokenLayout):
    """The packed tokens of one part; of two sequences others may lie in other parts.

    Those are the first of its ring slices and the first of its whole sequences, which continue what
    earlier parts hold, and the last ones, which later parts continue.
    """

    part: int = field(kw_only=True)
    earlier: dict[str, tuple[Held, ...]] = field(kw_only=True)
    """Of `RING` and `LOCAL`: in which parts the first one began, in order; empty: in this one."""
    padding: int = field(kw_only=True)
    """Tokens at the end that belong to no sequence."""
    is_seen_later: dict[str, bool] = field(kw_only=True)
    """Of `RING` and `LOCAL`: whether a later part continues the last one."""

    def first_rows(self, kind: str) -> slice:
        """Rows of the first ring slice, or of the first whole sequence."""
        if kind == RING:
            return slice(0, self.ring_slices[0])
        return slice(self.ring_tokens, self.ring_tokens + self.local_lengths[0])

    def last_rows(self, kind: str) -> slice:
        """Rows of the last ring slice, or of the last whole sequence that is no padding."""
        if kind == RING:
            return slice(self.ring_tokens - self.ring_slices[-1], self.ring_tokens)
        end = self.num_tokens - self.padding
        return slice(end - self.local_lengths[-2 if self.padding else -1], end)

    @cached_property
    def earlier_blocks(self) -> dict[str, Block]:
        """All queries of what continues against all keys that earlier parts hold of it here."""
        found = {}
        for kind, held in self.earlier.items():
            if held:
                rows = self.first_rows(kind)
                queries = Segments.of((rows.stop - rows.start,), self.device)
                keys = Segments.of((sum(one.num_tokens for one in held),), self.device)
                found[kind] = Block(queries, keys, causal=False)
        return found


class EarlierKeys:
    """Keys and values of one layer that later parts of a micro-batch see, and their gradients."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._gradients: dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def keep(self, layout: PartLayout, k: torch.Tensor, v: torch.Tensor) -> None:
        """Keeps what later parts see of this one; where it is computed again, that is kept."""
        for kind, is_seen in layout.is_seen_later.items():
            if is_seen and (kind, layout.part) not in self._kept:
                rows = layout.last_rows(kind)
                self._kept[kind, layout.part] = _own(k[rows]), _own(v[rows])

    def of(self, layout: PartLayout, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values that earlier parts hold here, in their order."""
        kept = [self._kept[kind, one.part] for one in layout.earlier[kind]]
        keys, values = (torch.cat(tensors) for tensors in zip(*kept, strict=True))
        return keys, values

    def add(self, layout: PartLayout, kind: str, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Adds to the gradients of what `of` has returned."""
        sizes = [one.num_tokens for one in layout.earlier[kind]]
        for one, *new in zip(layout.earlier[kind], dk.split(sizes), dv.split(sizes), strict=True):
            known = self._gradients.get((kind, one.part))
            if known is None:
                new = [accumulator(gradient) for gradient in new]
                self._gradients[kind, one.part] = new[0], new[1]
                continue
            for total, gradient in zip(known, new, strict=True):
                total += gradient

    def take(self, layout: PartLayout, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Adds what later parts found for the keys and values of this one; lets go of them."""
        for kind, is_seen in layout.is_seen_later.items():
            if is_seen:
                rows = layout.last_rows(kind)
                for gradient, found in zip(
                    (dk, dv), self._gradients.pop((kind, layout.part)), strict=True
                ):
                    gradient[rows] += found
                del self._kept[kind, layout.part]


def part_layouts(
    ring: tuple[int, ...],
    index: int,
    parts: Sequence[tuple[tuple[int, ...], tuple[int, ...], bool, bool, int]],
    device: torch.device,
) -> list[PartLayout]:
    """The layouts of a micro-batch's parts.

    Args:
        ring: as of `TokenLayout`, and so are `index` and `device`.
        index: likewise.
        device: likewise.
        parts: of each its ring slices and its whole sequences, whether the first of either
            continues what the part before ends with, and its padding.
    """
    began: dict[str, list[Held]] = {RING: [], LOCAL: []}
    earlier: list[dict[str, tuple[Held, ...]]] = []
    for number, (slices, lengths, continues_ring, continues_local, padding) in enumerate(parts):
        found = {}
        for kind, sizes, continues in (
            (RING, slices, continues_ring),
            (LOCAL, lengths[: len(lengths) - bool(padding)], continues_local),
        ):
            found[kind] = tuple(began[kind]) if continues else ()
            if sizes:
                before = began[kind] if continues and len(sizes) == 1 else []
                began[kind] = [*before, Held(number, sizes[-1])]
        earlier.append(found)
    return [
        PartLayout(
            ring=ring,
            index=index,
            ring_slices=slices,
            local_lengths=lengths,
            device=device,
            part=number,
            earlier=earlier[number],
            padding=padding,
            is_seen_later={
                kind: any(number == held.part for one in earlier for held in one[kind])
                for kind in (RING, LOCAL)
            },
        )
        for number, (slices, lengths, _, _, padding) in enumerate(parts)
    ]


def attend_to_earlier(
    q: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    layout: PartLayout,
    keys: EarlierKeys,
    comm: RingComm,
    kernel: AttentionKernel,
    scale: float,
) -> None:
    """Merges, in place, what the part's queries find among the keys of earlier parts."""
    for kind, block in layout.earlier_blocks.items():
        rows = layout.first_rows(kind)
        total, total_lse = accumulator(out[rows]), lse[rows].clone()
        for _, (k, v) in _passing(layout, keys, kind, comm):
            merge(total, total_lse, _ALL, *kernel.forward(q[rows], k, v, block, scale))
        out[rows], lse[rows] = total, total_lse


def gradients_of_earlier(
    dout: torch.Tensor,
    of: Forward,
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    layout: PartLayout,
    keys: EarlierKeys,
    comm: RingComm,
    kernel: AttentionKernel,
    scale: float,
) -> None:
    """Adds what comes through keys of earlier parts, and by later queries, to dq, dk and dv."""
    dq, dk, dv = gradients
    for kind, block in layout.earlier_blocks.items():
        rows = layout.first_rows(kind)
        dq_total = accumulator(dq[rows])

        def backward(
            _: int, k: torch.Tensor, v: torch.Tensor, rows: slice = rows, block: Block = block
        ) -> Found:
            here = Forward(of.q[rows], k, v, of.out[rows], of.lse[rows])
            dq_block, dk_block, dv_block = kernel.backward(dout[rows], here, block, scale)
            dq_total.add_(dq_block)  # noqa: B023, called before the next one
            return _ALL, dk_block, dv_block

        blocks = _passing(layout, keys, kind, comm)
        step, (k, v) = next(blocks)
        _, dk_block, dv_block = backward(step, k, v)
        keys.add(layout, kind, dk_block, dv_block)
        if kind == RING:
            travelled = gradients_of_travelling(blocks, k, v, layout, comm, backward)
            keys.add(layout, kind, *travelled)
        dq[rows] = dq_total
    keys.take(layout, dk, dv)


def _passing(layout: PartLayout, keys: EarlierKeys, kind: str, comm: RingComm) -> Passing:
    """What earlier parts hold: ours first, and of a ring's sequence that of the others behind."""
    k, v = keys.of(layout, kind)
    return travelling_kv(k, v, layout, comm) if kind == RING else iter([(0, (k, v))])


def _own(x: torch.Tensor) -> torch.Tensor:
    """The same values, in memory that holds nothing else."""
    x = x.detach()
    return x if x.untyped_storage().nbytes() == x.nbytes else x.clone()

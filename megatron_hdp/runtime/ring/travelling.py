"""What goes around a ring, hop by hop: keys or queries, and behind them what is found for them.

What travels passes all other members. What each of them finds for it, a gradient or a share of the
output, follows one hop behind, so that it ends at its owner after ``D - 1`` hops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch

from megatron_hdp.runtime.kernels import Block
from megatron_hdp.runtime.ring.comm import RingComm
from megatron_hdp.runtime.ring.layout import Rows, TokenLayout

Tensors: TypeAlias = Sequence[torch.Tensor]
Passing: TypeAlias = Iterator[tuple[int, list[torch.Tensor]]]
"""The step, and the tensors that are here then; step 0: our own."""

Adding: TypeAlias = Callable[[list[torch.Tensor]], None]
"""Adds what was found here to what others have found."""
Finding: TypeAlias = Callable[[int, list[torch.Tensor]], Adding]
"""What is found at a step for the tensors that are here then."""

ALL = slice(None)


class Field(NamedTuple):
    """A tensor of a message."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Its bytes."""
        return int(math.prod(self.shape) * self.dtype.itemsize)


def travelling(tensors: Tensors, layout: TokenLayout, comm: RingComm) -> Passing:
    """The tensors that pass by, as one message, with the step: 0 are our own.

    Those of a step are already on their way to the next member when they are yielded. They are
    overwritten two steps later: both their transfer and what is done with them come before.

    Args:
        tensors: of the same sizes on all members, wider types first.
        layout: of the ring.
        comm: of the rings.
    """
    fields = [Field(one.shape, one.dtype) for one in tensors]
    here, spare = _two_buffers(comm, "travelling", fields, tensors[0])
    for room, tensor in zip(_apart(here, fields), tensors, strict=True):
        room.copy_(tensor)
    for step in range(layout.degree):
        if step + 1 < layout.degree:
            transfer = comm.pass_on(here, layout.ring, layout.index, into=spare)
        yield step, _apart(here, fields)
        if step + 1 < layout.degree:
            here, spare = transfer.wait(), here


def found_by_others(
    blocks: Passing,
    fields: Sequence[Field],
    layout: TokenLayout,
    comm: RingComm,
    find: Finding,
    like: torch.Tensor,
    begin: Sequence[float] = (),
) -> list[torch.Tensor]:
    """What all others find for what travels from here; in buffers, until the next call.

    Args:
        blocks: those of `travelling` behind step 0.
        fields: what is found, of one type.
        layout: of the ring.
        comm: of the rings.
        find: called before what the members before us found is here.
        like: a tensor of the device.
        begin: of each field, what the first one adds to; zeros unless given.
    """
    here, spare = _two_buffers(comm, "found", fields, like)
    for total, value in zip(_apart(here, fields), begin or [0.0] * len(fields), strict=True):
        total.fill_(value)
    arriving = None
    for step, tensors in blocks:
        add = find(step, tensors)
        if arriving is not None:
            here, spare = arriving.wait(), here
        add(_apart(here, fields))
        arriving = comm.pass_on(here, layout.ring, layout.index, into=spare)
    assert arriving is not None, "a ring has at least two members"
    return _apart(arriving.wait(), fields)


def _two_buffers(
    comm: RingComm, name: str, fields: Sequence[Field], like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    size = sum(field.num_bytes for field in fields)
    here, spare = (comm.buffer(one, size, like, torch.uint8) for one in (name, f"spare {name}"))
    return here, spare


def _apart(message: torch.Tensor, fields: Sequence[Field]) -> list[torch.Tensor]:
    """Views of what a message holds."""
    pieces = message.split([field.num_bytes for field in fields])
    return [
        piece.view(field.dtype).view(field.shape)
        for piece, field in zip(pieces, fields, strict=True)
    ]


def block_at(layout: TokenLayout, queries: int, keys: int) -> tuple[Rows, Rows, Block]:
    """Where a member's queries meet the keys of another: rows of either, and their block.

    A member earlier in the ring: its head chunks are before all tokens, its tail chunks after.
    A later member: all its tokens are before the tail chunks, none before the head chunks.

    Args:
        layout: of the ring.
        queries: place of the member whose queries they are.
        keys: likewise.
    """
    if keys < queries:
        return ALL, layout.heads, Block(layout.slice_segments, layout.half_segments, causal=False)
    return layout.tails, ALL, Block(layout.half_segments, layout.slice_segments, causal=False)


def wide_type(x: torch.Tensor) -> torch.dtype:
    """The dtype sums are kept in: at least float32."""
    return torch.promote_types(x.dtype, torch.float32)


def accumulator(x: torch.Tensor) -> torch.Tensor:
    """A copy of `x` in the dtype of sums."""
    return x.to(wide_type(x), copy=True)


def add_at(total: torch.Tensor, rows: Rows, gradient: torch.Tensor) -> None:
    """Adds to these rows of `total`, in place."""
    if isinstance(rows, slice):
        total[rows].add_(gradient)
    else:
        total[rows] += gradient


def merge(
    total: torch.Tensor,
    total_lse: torch.Tensor,
    rows: Rows,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Adds a block's softmax-weighted output to `total` (online softmax), in place at `rows`."""
    before = total_lse[rows]
    share = torch.sigmoid(lse - before)  # exp(lse) / (exp(before) + exp(lse))
    total[rows] = torch.lerp(total[rows], out.to(total.dtype), share[..., None])
    total_lse[rows] = torch.logaddexp(before, lse)

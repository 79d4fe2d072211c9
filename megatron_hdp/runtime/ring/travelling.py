"""What goes around a ring, hop by hop: keys or queries, and behind them what is found for them.

What travels passes all other members. What each of them finds for it, a gradient or a share of the
output, follows one hop behind, so that it ends at its owner after ``D - 1`` hops.
"""

from __future__ import annotations

import math

import torch

from megatron_hdp.runtime.kernels import Block
from megatron_hdp.runtime.ring.comm import RingComm
from megatron_hdp.runtime.ring.double_ring import Groups, found_in_groups, travelling_in_groups
from megatron_hdp.runtime.ring.layout import Rows, TokenLayout
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

ALL = slice(None)


def travelling(tensors: Tensors, layout: TokenLayout, comm: RingComm) -> Passing:
    """The tensors that pass by, as one message, with how many places before us their member is.

    First come our own. Those that are yielded are already on their way to the next member. They are
    overwritten two steps later: both their transfer and what is done with them come before.

    Args:
        tensors: of the same sizes on all members, wider types first.
        layout: of the ring.
        comm: of the rings.
    """
    if size := comm.group_size(layout.ring):
        yield from travelling_in_groups(tensors, Groups(layout, comm, size))
        return
    fields = [Field(one.shape, one.dtype) for one in tensors]
    here, spare = buffers(comm, fields, tensors[0], "travelling", "spare travelling")
    put(here, fields, tensors)
    for step in range(layout.degree):
        if step + 1 < layout.degree:
            transfer = comm.pass_on(here, layout.ring, layout.index, into=spare)
        yield step, apart(here, fields)
        if step + 1 < layout.degree:
            here, spare = transfer.wait(), here


def found_by_others(
    blocks: Passing,
    found: Found,
    layout: TokenLayout,
    comm: RingComm,
    find: Finding,
    like: torch.Tensor,
) -> list[torch.Tensor]:
    """What all others find for what travels from here; in buffers, until the next call.

    Args:
        blocks: those of `travelling` behind our own.
        found: what it is.
        layout: of the ring.
        comm: of the rings.
        find: called before what the members before us found is here.
        like: a tensor of the device.
    """
    if size := comm.group_size(layout.ring):
        return found_in_groups(blocks, found, Groups(layout, comm, size), find, like)
    here, spare = buffers(comm, found.fields, like, "found", "spare found")
    fill(here, found)
    arriving = None
    for step, tensors in blocks:
        add = find(step, tensors)
        if arriving is not None:
            here, spare = arriving.wait(), here
        add(apart(here, found.fields))
        arriving = comm.pass_on(here, layout.ring, layout.index, into=spare)
    assert arriving is not None, "a ring has at least two members"
    return apart(arriving.wait(), found.fields)


def gradients_of(like: Tensors) -> Found:
    """Gradients of tensors like these, which are added up."""
    fields = [Field(one.shape, wide_type(one)) for one in like]
    return Found(fields, [0.0] * len(fields), _add_all)


def outputs_of(like: Tensors) -> Found:
    """Shares of an output and its log-sum-exp like these, which are merged."""
    return Found([Field(one.shape, wide_type(one)) for one in like], (0.0, -math.inf), _merge_all)


def _add_all(totals: Tensors, others: Tensors) -> None:
    for total, other in zip(totals, others, strict=True):
        total += other


def _merge_all(totals: Tensors, others: Tensors) -> None:
    """As `merge`; of some rows neither has found anything."""
    (total, before), (out, lse) = totals, others
    share = torch.where(lse == -math.inf, 0.0, torch.sigmoid(lse - before))
    torch.lerp(total, out, share[..., None], out=total)
    torch.logaddexp(before, lse, out=before)


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

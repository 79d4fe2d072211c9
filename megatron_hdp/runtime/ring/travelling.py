"""What goes around a ring, hop by hop: keys and values, and behind them their gradients.

Keys and values of a slice pass all other members. Backward sends them around once more; what each
member finds for them follows one hop behind, so that it ends at its owner after ``D - 1`` hops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch

from megatron_hdp.runtime.kernels import Block
from megatron_hdp.runtime.ring.comm import RingComm
from megatron_hdp.runtime.ring.layout import Rows, TokenLayout

Passing: TypeAlias = Iterator[tuple[int, tuple[torch.Tensor, torch.Tensor]]]
"""The step, and the keys and values that are here then; step 0: our own."""
Found: TypeAlias = tuple[Rows, torch.Tensor, torch.Tensor]
"""Rows of keys that were seen, and the gradients of these keys and values."""

_ALL = slice(None)


def travelling_kv(k: torch.Tensor, v: torch.Tensor, layout: TokenLayout, comm: RingComm) -> Passing:
    """The keys and values that pass by, with the step: 0 are our own.

    Those of a step are already on their way to the next member when they are yielded. They are
    overwritten two steps later: both their transfer and their block come before.
    """
    kv, spare = (comm.buffer(name, k.numel() + v.numel(), k) for name in ("kv", "spare kv"))
    torch.cat((k.flatten(), v.flatten()), out=kv)
    for step in range(layout.degree):
        if step + 1 < layout.degree:
            transfer = comm.pass_on(kv, layout.ring, layout.index, into=spare)
        yield step, two_of(kv, k, v)
        if step + 1 < layout.degree:
            kv, spare = transfer.wait(), kv


def gradients_of_travelling(
    blocks: Passing,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: TokenLayout,
    comm: RingComm,
    backward: Callable[[int, torch.Tensor, torch.Tensor], Found],
) -> tuple[torch.Tensor, torch.Tensor]:
    """What all others find for our keys and values, in the dtype of sums; until the next call.

    `blocks` are those of `travelling_kv` behind step 0; `backward` is what we find at a step.
    """
    dtype = torch.promote_types(k.dtype, torch.float32)
    size, arriving = k.numel() + v.numel(), None
    dkv, spare = (comm.buffer(name, size, k, dtype) for name in ("dkv", "spare dkv"))
    dkv.zero_()
    for step, (keys, values) in blocks:
        rows, dk_block, dv_block = backward(step, keys, values)
        # to what the members before us found for these keys and values, add ours
        if arriving is not None:
            dkv, spare = arriving.wait(), dkv
        dk_total, dv_total = two_of(dkv, k, v)
        dk_total[rows] += dk_block
        dv_total[rows] += dv_block
        arriving = comm.pass_on(dkv, layout.ring, layout.index, into=spare)
    assert arriving is not None, "a ring has at least two members"
    return two_of(arriving.wait(), k, v)


def block_at(layout: TokenLayout, step: int) -> tuple[Rows, Rows, Block]:
    """Rows of queries, rows of the keys held at `step` that these see, and their block.

    The keys are those of ring member ``index - step``.

    A member earlier in the ring: its head chunks are before all our tokens, its tail chunks after.
    A later member: all its tokens are before our tail chunks, none before our head chunks.
    """
    if step <= layout.index:
        return _ALL, layout.heads, Block(layout.slice_segments, layout.half_segments, causal=False)
    return layout.tails, _ALL, Block(layout.half_segments, layout.slice_segments, causal=False)


def two_of(kv: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What travels as one, as keys and values in the shapes of `k` and `v`."""
    keys, values = kv.split((k.numel(), v.numel()))
    return keys.view(k.shape), values.view(v.shape)


def accumulator(x: torch.Tensor) -> torch.Tensor:
    """A copy of `x` in the dtype sums are kept in: at least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32), copy=True)


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

"""Ring attention over one micro-batch: causal, packed, any degree, with whole local sequences beside.

Keys and values travel around the ring while queries stay (head-tail slices give every member the same
causal area). Backward sends keys and values around once more, and the gradient of a slice's keys and
values follows one hop behind them, so that it ends at its owner after ``D - 1`` hops: three times
``(D - 1) / D`` of the micro-batch's KV bytes in all (ByteScale, sections 5.1 and 7).
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_hdp.runtime.kernels import AttentionKernel, Lengths
from megatron_hdp.runtime.layout import Rows, TokenLayout
from megatron_hdp.runtime.ring_comm import RingComm

_ALL = slice(None)


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: TokenLayout,
    comm: RingComm,
    kernel: AttentionKernel,
    scale: float,
) -> torch.Tensor:
    """Causal attention of every sequence of the micro-batch, each within itself.

    Args:
        q: ``[t, heads, d]``, this rank's tokens in the layout's order.
        k: ``[t, kv_heads, d]``.
        v: ``[t, kv_heads, d]``.
        layout: what the tokens are; equal ring slices on every member.
        comm: the HDP communicator; not used when the layout has no ring.
        kernel: block attention.
        scale: softmax scale, usually ``1 / sqrt(d)``.

    Returns:
        ``[t, heads, d]``, differentiable in `q`, `k` and `v`.
    """
    if q.shape[0] != layout.num_tokens:
        raise ValueError(f"{q.shape[0]} tokens were given, the layout has {layout.num_tokens}")
    return _RingAttention.apply(q, k, v, layout, comm, kernel, scale)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: TokenLayout,
        comm: RingComm,
        kernel: AttentionKernel,
        scale: float,
    ) -> torch.Tensor:
        ring = layout.ring_tokens
        kv = torch.stack((k[:ring], v[:ring]))
        transfer = comm.pass_on(kv, layout.ring, layout.index) if ring else None
        out, lse = kernel.forward(q, k, v, layout.segments, layout.segments, True, scale)
        if ring:
            total, total_lse = _accumulator(out[:ring]), lse[:ring].clone()
            for step in range(1, layout.degree):
                kv = transfer.wait()
                if step + 1 < layout.degree:
                    transfer = comm.pass_on(kv, layout.ring, layout.index)
                rows, q_lengths, kv_rows, kv_lengths = _block(layout, step)
                block = kernel.forward(
                    q[:ring][rows], *kv[:, kv_rows], q_lengths, kv_lengths, False, scale
                )
                _merge(total, total_lse, rows, *block)
            out[:ring] = total
            lse[:ring] = total_lse
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.layout, ctx.comm, ctx.kernel, ctx.scale = layout, comm, kernel, scale
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        layout, comm, kernel, scale = ctx.layout, ctx.comm, ctx.kernel, ctx.scale
        ring = layout.ring_tokens
        kv = torch.stack((k[:ring], v[:ring]))
        transfer = comm.pass_on(kv, layout.ring, layout.index) if ring else None
        dq, dk, dv = kernel.backward(
            dout, q, k, v, out, lse, layout.segments, layout.segments, True, scale
        )
        if ring:
            dq_ring = _accumulator(dq[:ring])
            dkv_transfer = None
            for step in range(1, layout.degree):
                kv = transfer.wait()
                if step + 1 < layout.degree:
                    transfer = comm.pass_on(kv, layout.ring, layout.index)
                rows, q_lengths, kv_rows, kv_lengths = _block(layout, step)
                # `kernel` takes (dout, q, k, v, out, lse); the queries' rows of each but k and v
                dq_block, *dkv_block = kernel.backward(
                    dout[:ring][rows],
                    q[:ring][rows],
                    *kv[:, kv_rows],
                    out[:ring][rows],
                    lse[:ring][rows],
                    q_lengths,
                    kv_lengths,
                    False,
                    scale,
                )
                dq_ring[rows] += dq_block
                dkv = torch.zeros_like(_accumulator(kv)) if step == 1 else dkv_transfer.wait()
                dkv[:, kv_rows] += torch.stack(dkv_block)
                dkv_transfer = comm.pass_on(dkv, layout.ring, layout.index)
            dkv = dkv_transfer.wait()
            dq[:ring] = dq_ring
            dk[:ring] += dkv[0]
            dv[:ring] += dkv[1]
        return dq, dk, dv, None, None, None, None


def _block(layout: TokenLayout, step: int) -> tuple[Rows, Lengths, Rows, Lengths]:
    """Which queries see which of the keys held at `step`, those of ring member ``index - step``.

    A member earlier in the ring: its head chunks are before all our tokens, its tail chunks after.
    A later member: all its tokens are before our tail chunks, none before our head chunks.
    """
    if step <= layout.index:
        return _ALL, layout.ring_slices, layout.heads, layout.half_slices
    return layout.tails, layout.half_slices, _ALL, layout.ring_slices


def _accumulator(x: torch.Tensor) -> torch.Tensor:
    """A copy of `x` in the dtype sums are kept in: at least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32), copy=True)


def _merge(
    total: torch.Tensor,
    total_lse: torch.Tensor,
    rows: Rows,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Adds a block's softmax-weighted output to `total` (online softmax), in place at `rows`."""
    before = total_lse[rows]
    after = torch.logaddexp(before, lse)
    total[rows] = (
        total[rows] * (before - after).exp()[..., None] + out * (lse - after).exp()[..., None]
    )
    total_lse[rows] = after

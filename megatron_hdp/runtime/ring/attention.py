"""Ring attention over one micro-batch: causal, packed, any degree, whole local sequences beside.

Keys and values travel around the ring while queries stay (head-tail slices give every member the
same causal area). Backward sends keys and values around once more, and the gradient of a slice's
keys and values follows one hop behind them, so that it ends at its owner after ``D - 1`` hops:
three times ``(D - 1) / D`` of the micro-batch's KV bytes in all (ByteScale, sections 5.1 and 7).
With a window that is shorter than the ring's longest sequence, `windowed` serves instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megatron_hdp.runtime.kernels import AttentionKernel, Block, Forward
from megatron_hdp.runtime.ring.comm import RingComm
from megatron_hdp.runtime.ring.layout import Rows, TokenLayout
from megatron_hdp.runtime.ring.sink import gradient_of_sink, with_sink
from megatron_hdp.runtime.ring.windowed import WindowedAttention

_ALL = slice(None)


class RingAttention:
    """An attention backend: our own ring over a block kernel."""

    def __init__(self, kernel: AttentionKernel) -> None:
        self.kernel = kernel
        self.name = kernel.name

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: TokenLayout,
        comm: RingComm,
        scale: float,
        *,
        window: int | None = None,
        sink: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `attention.AttentionBackend`."""
        if q.shape[0] != layout.num_tokens:
            raise ValueError(f"{q.shape[0]} tokens were given, the layout has {layout.num_tokens}")
        if window is not None and window >= max(layout.longest_in_ring, layout.longest):
            window = None  # it hides nothing
        how = layout, comm, self.kernel, scale, window
        # members of a ring decide the same, with any sequences beside their slices
        if window is not None and (window < layout.longest_in_ring or not layout.ring_slices):
            return WindowedAttention.apply(q, k, v, sink, *how)
        return _RingAttention.apply(q, k, v, sink, *how)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
        layout: TokenLayout,
        comm: RingComm,
        kernel: AttentionKernel,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """`window`: of the local sequences; it reaches over each of the ring's."""
        ring, segments = slice(0, layout.ring_tokens), layout.causal_segments
        own = Block(segments, segments, causal=True, window=window)
        if layout.ring_slices:
            blocks = _travelling_kv(k[ring], v[ring], layout, comm)
            next(blocks)  # our own keys and values leave while we attend to them
        out, lse = kernel.forward(q, k, v, own, scale)
        if layout.ring_slices:
            total, total_lse = _accumulator(out[ring]), lse[ring].clone()
            for step, (keys, values) in blocks:
                rows, kv_rows, block = _block(layout, step)
                block_out, block_lse = kernel.forward(
                    q[ring][rows], keys[kv_rows], values[kv_rows], block, scale
                )
                _merge(total, total_lse, rows, block_out, block_lse)
            out[ring], lse[ring] = total, total_lse
        out, lse = with_sink(out, lse, sink)
        ctx.save_for_backward(q, k, v, sink, out, lse)
        ctx.layout, ctx.comm, ctx.kernel, ctx.own, ctx.scale = layout, comm, kernel, own, scale
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sink, out, lse = ctx.saved_tensors
        layout, comm, kernel, scale = ctx.layout, ctx.comm, ctx.kernel, ctx.scale
        ring = slice(0, layout.ring_tokens)
        if layout.ring_slices:
            blocks = _travelling_kv(k[ring], v[ring], layout, comm)
            next(blocks)
        dq, dk, dv = kernel.backward(dout, Forward(q, k, v, out, lse), ctx.own, scale)
        if layout.ring_slices:
            dq_total = _accumulator(dq[ring])
            dkv = dq_total.new_zeros(k[ring].numel() + v[ring].numel())
            spare, arriving = torch.empty_like(dkv), None
            for step, (keys, values) in blocks:
                rows, kv_rows, block = _block(layout, step)
                dout_s, q_s, out_s, lse_s = (x[ring][rows] for x in (dout, q, out, lse))
                whole = Forward(q_s, keys[kv_rows], values[kv_rows], out_s, lse_s)
                dq_block, dk_block, dv_block = kernel.backward(dout_s, whole, block, scale)
                dq_total[rows] += dq_block
                # to what the members before us found for these keys and values, add ours
                if arriving is not None:
                    dkv, spare = arriving.wait(), dkv
                dk_total, dv_total = _parts(dkv, k[ring], v[ring])
                dk_total[kv_rows] += dk_block
                dv_total[kv_rows] += dv_block
                arriving = comm.pass_on(dkv, layout.ring, layout.index, into=spare)
            assert arriving is not None, "a ring has at least two members"
            dk_total, dv_total = _parts(arriving.wait(), k[ring], v[ring])
            dq[ring] = dq_total
            dk[ring] += dk_total
            dv[ring] += dv_total
        return dq, dk, dv, gradient_of_sink(sink, dout, out, lse), *[None] * 5


def _travelling_kv(
    k: torch.Tensor, v: torch.Tensor, layout: TokenLayout, comm: RingComm
) -> Iterator[tuple[int, tuple[torch.Tensor, torch.Tensor]]]:
    """The keys and values that pass by, with the step: 0 are our own.

    Those of a step are already on their way to the next member when they are yielded. They are
    overwritten two steps later: both their transfer and their block come before.
    """
    kv = torch.cat((k.flatten(), v.flatten()))
    spare = torch.empty_like(kv)
    for step in range(layout.degree):
        if step + 1 < layout.degree:
            transfer = comm.pass_on(kv, layout.ring, layout.index, into=spare)
        yield step, _parts(kv, k, v)
        if step + 1 < layout.degree:
            kv, spare = transfer.wait(), kv


def _parts(kv: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What travels as one, as keys and values in the shapes of `k` and `v`."""
    keys, values = kv.split((k.numel(), v.numel()))
    return keys.view(k.shape), values.view(v.shape)


def _block(layout: TokenLayout, step: int) -> tuple[Rows, Rows, Block]:
    """Rows of queries, rows of the keys held at `step` that these see, and their block.

    The keys are those of ring member ``index - step``.

    A member earlier in the ring: its head chunks are before all our tokens, its tail chunks after.
    A later member: all its tokens are before our tail chunks, none before our head chunks.
    """
    if step <= layout.index:
        return _ALL, layout.heads, Block(layout.slice_segments, layout.half_segments, causal=False)
    return layout.tails, _ALL, Block(layout.half_segments, layout.slice_segments, causal=False)


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
    share = torch.sigmoid(lse - before)  # exp(lse) / (exp(before) + exp(lse))
    total[rows] = torch.lerp(total[rows], out.to(total.dtype), share[..., None])
    total_lse[rows] = torch.logaddexp(before, lse)

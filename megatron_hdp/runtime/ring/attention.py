"""Ring attention over one micro-batch: causal, packed, any degree, whole local sequences beside.

Keys and values travel around the ring while queries stay (head-tail slices give every member the
same causal area). Backward sends keys and values around once more, and the gradient of a slice's
keys and values follows one hop behind them, so that it ends at its owner after ``D - 1`` hops:
three times ``(D - 1) / D`` of the micro-batch's KV bytes in all (ByteScale, sections 5.1 and 7).
With a window that is shorter than the ring's longest sequence, `windowed` serves instead.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_hdp.runtime.kernels import AttentionKernel, Block, Forward
from megatron_hdp.runtime.ring.comm import RingComm
from megatron_hdp.runtime.ring.layout import TokenLayout
from megatron_hdp.runtime.ring.parts import (
    EarlierKeys,
    PartLayout,
    attend_to_earlier,
    gradients_of_earlier,
)
from megatron_hdp.runtime.ring.sink import gradient_of_sink, with_sink
from megatron_hdp.runtime.ring.travelling import (
    Found,
    accumulator,
    block_at,
    gradients_of_travelling,
    merge,
    travelling_kv,
)
from megatron_hdp.runtime.ring.windowed import WindowedAttention


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
        earlier: EarlierKeys | None = None,
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
        return _RingAttention.apply(q, k, v, sink, *how, earlier)


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
        earlier: EarlierKeys | None,
    ) -> torch.Tensor:
        """`window`: of the local sequences; it reaches over each of the ring's."""
        ring, segments = slice(0, layout.ring_tokens), layout.causal_segments
        own = Block(segments, segments, causal=True, window=window)
        if layout.ring_slices:
            blocks = travelling_kv(k[ring], v[ring], layout, comm)
            next(blocks)  # our own keys and values leave while we attend to them
        out, lse = kernel.forward(q, k, v, own, scale)
        if layout.ring_slices:
            total, total_lse = accumulator(out[ring]), lse[ring].clone()
            for step, (keys, values) in blocks:
                rows, kv_rows, block = block_at(layout, step)
                block_out, block_lse = kernel.forward(
                    q[ring][rows], keys[kv_rows], values[kv_rows], block, scale
                )
                merge(total, total_lse, rows, block_out, block_lse)
            out[ring], lse[ring] = total, total_lse
        if earlier is not None:
            assert isinstance(layout, PartLayout), "earlier keys are those of parts"
            earlier.keep(layout, k, v)
            attend_to_earlier(q, out, lse, layout, earlier, comm, kernel, scale)
        out, lse = with_sink(out, lse, sink)
        ctx.save_for_backward(q, k, v, sink, out, lse)
        ctx.layout, ctx.comm, ctx.kernel, ctx.own, ctx.scale = layout, comm, kernel, own, scale
        ctx.earlier = earlier
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sink, out, lse = ctx.saved_tensors
        layout, comm, kernel, scale = ctx.layout, ctx.comm, ctx.kernel, ctx.scale
        ring = slice(0, layout.ring_tokens)
        if layout.ring_slices:
            blocks = travelling_kv(k[ring], v[ring], layout, comm)
            next(blocks)
        dq, dk, dv = kernel.backward(dout, Forward(q, k, v, out, lse), ctx.own, scale)
        if layout.ring_slices:
            dq_total = accumulator(dq[ring])

            def found_in(step: int, keys: torch.Tensor, values: torch.Tensor) -> Found:
                rows, kv_rows, block = block_at(layout, step)
                dout_s, q_s, out_s, lse_s = (x[ring][rows] for x in (dout, q, out, lse))
                whole = Forward(q_s, keys[kv_rows], values[kv_rows], out_s, lse_s)
                dq_block, dk_block, dv_block = kernel.backward(dout_s, whole, block, scale)
                dq_total[rows] += dq_block
                return kv_rows, dk_block, dv_block

            travelled = k[ring], v[ring], layout, comm
            dk_total, dv_total = gradients_of_travelling(blocks, *travelled, found_in)
            dq[ring] = dq_total
            dk[ring] += dk_total
            dv[ring] += dv_total
        if ctx.earlier is not None:
            of = Forward(q, k, v, out, lse)
            how = layout, ctx.earlier, comm, kernel, scale
            gradients_of_earlier(dout, of, (dq, dk, dv), *how)
        return dq, dk, dv, gradient_of_sink(sink, dout, out, lse), *[None] * 6

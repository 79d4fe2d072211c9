"""Attention with a window: what a rank's queries see beyond its own chunks is their halo.

Each chunk attends once, to its halo and itself, so no blocks are merged. Backward fetches the halo
again and sends its gradient home: three times its KV bytes in all, whatever the sequence's length.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_hdp.runtime.kernels import AttentionKernel, Block, Forward
from megatron_hdp.runtime.ring.comm import RingComm
from megatron_hdp.runtime.ring.halo import Halo
from megatron_hdp.runtime.ring.layout import TokenLayout
from megatron_hdp.runtime.ring.parts import EarlierKeys
from megatron_hdp.runtime.ring.sink import gradient_of_sink, with_sink


class WindowedAttention(torch.autograd.Function):
    """`RingAttention` where the ring has a sequence that is longer than the window, or no ring."""

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
        window: int,
        earlier: EarlierKeys | None,
    ) -> torch.Tensor:
        """See `attention.AttentionBackend`."""
        halo = Halo.of(layout, window)
        keys, values = halo.with_halo(k, v, comm, earlier)
        block = Block(halo.q_segments, halo.k_segments, causal=True, window=window)
        out, lse = kernel.forward(q, keys, values, block, scale)
        out, lse = with_sink(out, lse, sink)
        ctx.save_for_backward(q, k, v, sink, out, lse)
        ctx.halo, ctx.comm, ctx.kernel, ctx.block, ctx.scale = halo, comm, kernel, block, scale
        ctx.earlier = earlier
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of `q`, `k`, `v` and `sink`."""
        q, k, v, sink, out, lse = ctx.saved_tensors
        halo: Halo = ctx.halo
        keys, values = halo.with_halo(k, v, ctx.comm, ctx.earlier)
        of = Forward(q, keys, values, out, lse)
        dq, dk, dv = ctx.kernel.backward(dout, of, ctx.block, ctx.scale)
        dk, dv = halo.home(dk, dv, ctx.comm, ctx.earlier)
        return dq, dk, dv, gradient_of_sink(sink, dout, out, lse), *[None] * 6

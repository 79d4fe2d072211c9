"""Ring attention over one micro-batch: causal, packed, any degree, whole local sequences beside.

Without a window, or with one that reaches over all of the ring's sequences, `dense` serves, else
`windowed`; a sink is added to what either finds.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_hdp.runtime.kernels import AttentionKernel
from megatron_hdp.runtime.ring.comm import RingComm
from megatron_hdp.runtime.ring.dense import DenseAttention
from megatron_hdp.runtime.ring.layout import TokenLayout
from megatron_hdp.runtime.ring.parts import EarlierKeys, PartLayout
from megatron_hdp.runtime.ring.sink import gradient_of_sink, with_sink
from megatron_hdp.runtime.ring.source import PlainKeys
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
        how = comm, self.kernel, scale
        # members of a ring decide the same, with any sequences beside their slices
        if window is not None and (window < layout.longest_in_ring or not layout.ring_slices):
            return WindowedAttention.apply(q, k, v, sink, layout, *how, window, earlier)
        if window is None or not isinstance(layout, PartLayout):
            dense = DenseAttention(layout, *how, PlainKeys(), window, earlier)
            return _RingAttention.apply(q, k, v, sink, dense)
        # of the sequences beside the ring's some reach into other parts
        ring, alone = layout.by_kind
        of_ring, of_rank = zip(
            *(x.tensor_split((ring.num_tokens,)) for x in (q, k, v)), strict=True
        )
        dense = DenseAttention(ring, *how, PlainKeys(), None, earlier)
        found = _RingAttention.apply(*of_ring, sink, dense)
        if not alone.num_tokens:
            return found
        local = WindowedAttention.apply(*of_rank, sink, alone, *how, window, earlier)
        return torch.cat((found, local))


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
        dense: DenseAttention,
    ) -> torch.Tensor:
        out, lse = with_sink(*dense.forward(q, (k, v)), sink)
        ctx.save_for_backward(q, k, v, sink, out, lse)
        ctx.dense = dense
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sink, out, lse = ctx.saved_tensors
        gradients = ctx.dense.backward(dout, q, (k, v), out, lse)
        return *gradients, gradient_of_sink(sink, dout, out, lse), None

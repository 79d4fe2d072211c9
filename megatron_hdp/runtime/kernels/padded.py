"""A block kernel of one head size, for heads whose keys and values differ in size.

Multi-latent attention has such heads. What is smaller is filled with zeros: they add nothing to
scores, and their part of the output is cut off again.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional

from megatron_hdp.runtime.kernels.block import AttentionKernel
from megatron_hdp.runtime.kernels.segments import Block


class PaddedKernel:
    """Like `kernel`, whose queries, keys and values must have one size, for values of another."""

    def __init__(self, kernel: AttentionKernel) -> None:
        self.kernel = kernel
        self.name = kernel.name

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `AttentionKernel.forward`; the output has the values' size."""
        size = max(q.shape[-1], v.shape[-1])
        q_filled, k_filled, v_filled = _filled(size, q, k, v)
        out, lse = self.kernel.forward(q_filled, k_filled, v_filled, block, scale)
        return _cut(out, v.shape[-1]), lse

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        block: Block,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `AttentionKernel.backward`."""
        size = max(q.shape[-1], v.shape[-1])
        dout, q_filled, k_filled, v_filled, out = _filled(size, dout, q, k, v, out)
        dq, dk, dv = self.kernel.backward(
            dout, q_filled, k_filled, v_filled, out, lse, block, scale
        )
        return _cut(dq, q.shape[-1]), _cut(dk, k.shape[-1]), _cut(dv, v.shape[-1])


def _filled(size: int, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x if x.shape[-1] == size else _widened(x, size) for x in tensors]


def _widened(x: torch.Tensor, size: int) -> torch.Tensor:
    return functional.pad(x, (0, size - x.shape[-1]))


def _cut(x: torch.Tensor, size: int) -> torch.Tensor:
    """A tensor of its own: a view would keep the zeros alive until backward."""
    return x if x.shape[-1] == size else x[..., :size].contiguous()

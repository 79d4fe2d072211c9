"""A block kernel of one head size, for heads whose keys and values differ in size.

Multi-latent attention has such heads. What is smaller is filled with zeros: they add nothing to
scores, and their part of the output is cut off again.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional

from megatron_hdp.runtime.kernels.block import AttentionKernel
from megatron_hdp.runtime.kernels.segments import Block, Forward, Gradients


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

    def backward(self, dout: torch.Tensor, of: Forward, block: Block, scale: float) -> Gradients:
        """See `AttentionKernel.backward`."""
        size = max(of.q.shape[-1], of.v.shape[-1])
        dout, q, k, v, out = _filled(size, dout, *of[:4])
        gradients = self.kernel.backward(dout, Forward(q, k, v, out, of.lse), block, scale)
        dq, dk, dv = (_cut(x, y.shape[-1]) for x, y in zip(gradients, of[:3], strict=True))
        return dq, dk, dv


def _filled(size: int, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [functional.pad(x, (0, size - x.shape[-1])) for x in tensors]


def _cut(x: torch.Tensor, size: int) -> torch.Tensor:
    """A tensor of its own: a view would keep the zeros alive until backward."""
    return x if x.shape[-1] == size else x[..., :size].contiguous()

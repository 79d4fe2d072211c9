"""Attention kernels: one block of queries against one block of keys, packed sequences, with LSE.

A kernel satisfies `AttentionKernel`. The ring merges the blocks' outputs by their log-sum-exp and
calls `backward` with the *merged* output and LSE, which makes each block's gradient exact by
itself. Those for GPUs are in `flash` and `matmul`.
"""

from __future__ import annotations

from typing import Protocol

import torch

from megatron_hdp.runtime.kernels.matmul import MatmulKernel
from megatron_hdp.runtime.kernels.segments import Block, Forward, Gradients


class AttentionKernel(Protocol):
    """Attention of packed segments; segment ``i`` of the queries sees only that of the keys.

    Shapes: `q` ``[tq, heads, d]``, `k` and `v` ``[tk, kv_heads, d]`` with heads a multiple of
    kv_heads (grouped-query attention), `out` like `q`, `lse` ``[tq, heads]`` (float32, or float64
    for float64 inputs). Which keys a query sees is `block`'s.
    """

    name: str

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) of the block."""
        ...

    def backward(self, dout: torch.Tensor, of: Forward, block: Block, scale: float) -> Gradients:
        """(dq, dk, dv) of the block."""
        ...


class CpuFlashKernel:
    """PyTorch's flash SDPA for the CPU, segment by segment; float64, float32 and bfloat16."""

    name = "torch-sdpa-cpu"

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `AttentionKernel.forward`; with a window by `MatmulKernel`."""
        if block.window is not None:
            return MatmulKernel().forward(q, k, v, block, scale)
        outs, lses = [], []
        by_key = [x.split(block.k_segments.lengths) for x in (k, v)]
        for qs, ks, vs in zip(q.split(block.q_segments.lengths), *by_key, strict=True):
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                _batched(qs), _batched(ks), _batched(vs), 0.0, block.causal, scale=scale
            )
            outs.append(_packed(out))
            lses.append(lse[0].transpose(0, 1))
        return torch.cat(outs), torch.cat(lses)

    def backward(self, dout: torch.Tensor, of: Forward, block: Block, scale: float) -> Gradients:
        """See `AttentionKernel.backward`."""
        if block.window is not None:
            return MatmulKernel().backward(dout, of, block, scale)
        by_query = [x.split(block.q_segments.lengths) for x in (dout, of.q, of.out, of.lse)]
        by_key = [x.split(block.k_segments.lengths) for x in (of.k, of.v)]
        blocks = []
        for dout_s, q_s, out_s, lse_s, k_s, v_s in zip(*by_query, *by_key, strict=True):
            grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *map(_batched, (dout_s, q_s, k_s, v_s, out_s)),
                lse_s.transpose(0, 1)[None],
                0.0,
                block.causal,
                scale=scale,
            )
            blocks.append([_packed(grad) for grad in grads])
        dq, dk, dv = (torch.cat(parts) for parts in zip(*blocks, strict=True))
        return dq, dk, dv


def _batched(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1)[None]  # [t, h, d] -> [1, h, t, d]


def _packed(x: torch.Tensor) -> torch.Tensor:
    return x[0].transpose(0, 1)  # [1, h, t, d] -> [t, h, d]

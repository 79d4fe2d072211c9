"""A ring of multi-latent attention in which the latent travels, not the keys and values made of it.

A token's keys and values of all heads are a projection of its latent; the rotated part of its keys,
one for all heads, travels beside it. Each member projects what arrives, once more in backward: the
gradient of the latent follows one hop behind it, and each member's part of the projection's
gradient, a sum over tokens, stays where it is found. Whole local sequences lie beside, as in
`ring.attention`; keys and values are kept for none of them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional

from megatron_hdp.runtime.kernels import AttentionKernel, Block, Forward
from megatron_hdp.runtime.ring.comm import RingComm
from megatron_hdp.runtime.ring.layout import TokenLayout
from megatron_hdp.runtime.ring.travelling import (
    Found,
    accumulator,
    block_at,
    gradients_of_travelling,
    merge,
    travelling_kv,
)


class LatentRing:
    """Attention over latents: our own ring over a block kernel.

    Args:
        kernel: takes values of another size than that of queries and keys, where they differ.
    """

    def __init__(self, kernel: AttentionKernel) -> None:
        self.kernel = kernel

    def __call__(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        rotated: torch.Tensor,
        weight: torch.Tensor,
        layout: TokenLayout,
        comm: RingComm,
        scale: float,
    ) -> torch.Tensor:
        """Attends, together with the other members of the layout's ring.

        Args:
            q: ``[t, heads, d + p]``, this rank's tokens in the layout's order.
            latent: ``[t, r]``, as the projection takes it.
            rotated: ``[t, p]``, the last channels of the keys of all heads.
            weight: ``[heads * (d + v), r]``, of each head the rows of its keys, then its values.
            layout: what the tokens are; equal ring slices on every member.
            comm: the HDP communicator; not used when the layout has no ring.
            scale: softmax scale.

        Returns:
            ``[t, heads, v]``, differentiable in the four tensors.

        Raises:
            ValueError: the tensors do not have the layout's tokens.
        """
        if q.shape[0] != layout.num_tokens:
            raise ValueError(f"{q.shape[0]} tokens were given, the layout has {layout.num_tokens}")
        return _LatentRing.apply(q, latent, rotated, weight, layout, comm, self.kernel, scale)


class _LatentRing(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        latent: torch.Tensor,
        rotated: torch.Tensor,
        weight: torch.Tensor,
        layout: TokenLayout,
        comm: RingComm,
        kernel: AttentionKernel,
        scale: float,
    ) -> torch.Tensor:
        ring, segments = slice(0, layout.ring_tokens), layout.causal_segments
        own = Block(segments, segments, causal=True)
        projection = _Projection(weight, q, rotated)
        if layout.ring_slices:
            blocks = travelling_kv(latent[ring], rotated[ring], layout, comm)
            next(blocks)  # our own latents leave while we attend to their keys
        k, v = projection.keys_and_values(latent, rotated)
        out, lse = kernel.forward(q, k, v, own, scale)
        del k, v
        if layout.ring_slices:
            total, total_lse = accumulator(out[ring]), lse[ring].clone()
            for step, (latents, turned) in blocks:
                rows, kv_rows, block = block_at(layout, step)
                k, v = projection.keys_and_values(latents[kv_rows], turned[kv_rows])
                block_out, block_lse = kernel.forward(q[ring][rows], k, v, block, scale)
                merge(total, total_lse, rows, block_out, block_lse)
            out[ring], lse[ring] = total, total_lse
        ctx.save_for_backward(q, latent, rotated, weight, out, lse)
        ctx.layout, ctx.comm, ctx.kernel, ctx.scale = layout, comm, kernel, scale
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, latent, rotated, weight, out, lse = ctx.saved_tensors
        layout, comm, kernel, scale = ctx.layout, ctx.comm, ctx.kernel, ctx.scale
        ring, segments = slice(0, layout.ring_tokens), layout.causal_segments
        own = Block(segments, segments, causal=True)
        projection = _Projection(weight, q, rotated, learns=ctx.needs_input_grad[3])
        if layout.ring_slices:
            blocks = travelling_kv(latent[ring], rotated[ring], layout, comm)
            next(blocks)
        k, v = projection.keys_and_values(latent, rotated)
        dq, dk, dv = kernel.backward(dout, Forward(q, k, v, out, lse), own, scale)
        dlatent, drotated = projection.gradients(dk, dv, latent)
        del k, v, dk, dv
        if layout.ring_slices:
            dq_total = accumulator(dq[ring])
            mine = latent[ring], rotated[ring]

            def found_in(step: int, latents: torch.Tensor, turned: torch.Tensor) -> Found:
                rows, kv_rows, block = block_at(layout, step)
                seen = latents[kv_rows]
                k, v = projection.keys_and_values(seen, turned[kv_rows])
                dout_s, q_s, out_s, lse_s = (x[ring][rows] for x in (dout, q, out, lse))
                whole = Forward(q_s, k, v, out_s, lse_s)
                dq_block, dk, dv = kernel.backward(dout_s, whole, block, scale)
                dq_total[rows] += dq_block
                return kv_rows, *projection.gradients(dk, dv, seen)

            totals = gradients_of_travelling(blocks, *mine, layout, comm, found_in)
            dq[ring] = dq_total
            for own, total in zip((dlatent, drotated), totals, strict=True):
                own[ring] += total
        gradients = dq, dlatent.to(latent.dtype), drotated.to(rotated.dtype), projection.dweight
        return (*gradients, None, None, None, None)


class _Projection:
    """Keys and values made of latents, and their gradients taken back.

    Args:
        weight: of the projection.
        q: ``[t, heads, d + p]``.
        rotated: ``[t, p]``.
        learns: whether the weight wants a gradient.
    """

    def __init__(
        self, weight: torch.Tensor, q: torch.Tensor, rotated: torch.Tensor, learns: bool = False
    ) -> None:
        self._weight, self._heads = weight, q.shape[1]
        self._num_plain = q.shape[2] - rotated.shape[1]  # d
        self._wide = torch.promote_types(weight.dtype, torch.float32)
        self.dweight = torch.zeros_like(weight, dtype=self._wide) if learns else None

    def keys_and_values(
        self, latent: torch.Tensor, rotated: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``[t, heads, d + p]`` and ``[t, heads, v]``."""
        both = functional.linear(latent, self._weight).unflatten(1, (self._heads, -1))
        plain, v = both.tensor_split((self._num_plain,), -1)
        return torch.cat((plain, rotated[:, None].expand(-1, self._heads, -1)), -1), v

    def gradients(
        self, dk: torch.Tensor, dv: torch.Tensor, latent: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the latents ``[t, r]`` and of the rotated part ``[t, p]``; the weight's is added up.

        Args:
            dk: ``[t, heads, d + p]``.
            dv: ``[t, heads, v]``.
            latent: whose keys and values these are the gradients of.
        """
        plain, turned = dk.tensor_split((self._num_plain,), -1)
        dboth = torch.cat((plain, dv), -1).flatten(1)
        if self.dweight is not None:
            self.dweight += dboth.t() @ latent
        return (dboth @ self._weight).to(self._wide), turned.to(self._wide).sum(1)

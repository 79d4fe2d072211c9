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

from megatron_hdp.runtime.kernels import AttentionKernel
from megatron_hdp.runtime.ring.comm import RingComm
from megatron_hdp.runtime.ring.dense import DenseAttention, Keys
from megatron_hdp.runtime.ring.layout import TokenLayout
from megatron_hdp.runtime.ring.parts import EarlierKeys


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
        earlier: EarlierKeys | None = None,
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
            earlier: of a `PartLayout` the layer's latents of other parts.

        Returns:
            ``[t, heads, v]``, differentiable in the four tensors.

        Raises:
            ValueError: the tensors do not have the layout's tokens.
        """
        if q.shape[0] != layout.num_tokens:
            raise ValueError(f"{q.shape[0]} tokens were given, the layout has {layout.num_tokens}")
        how = layout, comm, self.kernel, scale, earlier
        return _LatentRing.apply(q, latent, rotated, weight, *how)


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
        earlier: EarlierKeys | None,
    ) -> torch.Tensor:
        projection = _Projection(weight, q, rotated)
        dense = DenseAttention(layout, comm, kernel, scale, projection, earlier=earlier)
        out, lse = dense.forward(q, (latent, rotated))
        ctx.save_for_backward(q, latent, rotated, weight, out, lse)
        ctx.how = layout, comm, kernel, scale, earlier
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, latent, rotated, weight, out, lse = ctx.saved_tensors
        projection = _Projection(weight, q, rotated, learns=ctx.needs_input_grad[3])
        layout, comm, kernel, scale, earlier = ctx.how
        dense = DenseAttention(layout, comm, kernel, scale, projection, earlier=earlier)
        dq, dlatent, drotated = dense.backward(dout, q, (latent, rotated), out, lse)
        gradients = dq, dlatent.to(latent.dtype), drotated.to(rotated.dtype), projection.dweight
        return (*gradients, None, None, None, None, None)


class _Projection:
    """Keys and values made of latents, and their gradients taken back.

    Args:
        weight: of the projection.
        q: ``[t, heads, d + p]``.
        rotated: ``[t, p]``.
        learns: whether the weight wants a gradient.
    """

    is_plain = False

    def __init__(
        self, weight: torch.Tensor, q: torch.Tensor, rotated: torch.Tensor, learns: bool = False
    ) -> None:
        self._weight, self._heads = weight, q.shape[1]
        self._num_plain = q.shape[2] - rotated.shape[1]  # d
        self._wide = torch.promote_types(weight.dtype, torch.float32)
        self.dweight = torch.zeros_like(weight, dtype=self._wide) if learns else None

    def value_dim(self, keys: Keys) -> int:
        """Size of a value's head."""
        return int(self._weight.shape[0] // self._heads - self._num_plain)

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

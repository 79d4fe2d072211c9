"""A ring of multi-latent attention in which the latent travels, not the keys and values made of it.

A token's keys and values of all heads are a projection of its latent; the rotated part of its keys,
one for all heads, travels beside it. Each member projects what arrives, once more in backward: the
gradient of the latent follows one hop behind it, and each member's part of the projection's
gradient, a sum over tokens, stays where it is found. Whole local sequences lie beside, as in
`ring.attention`; keys and values are kept for none of them.

Keys and values of the first heads may travel made beside the latent: then their owner alone
projects them, and takes back the sum of what all members find for them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional

from megatron_hdp.runtime.kernels import AttentionKernel
from megatron_hdp.runtime.ring.comm import RingComm
from megatron_hdp.runtime.ring.dense import DenseAttention
from megatron_hdp.runtime.ring.layout import TokenLayout
from megatron_hdp.runtime.ring.parts import EarlierKeys
from megatron_hdp.runtime.ring.source import Keys, Maker


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
        made_heads: int = 0,
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
            made_heads: heads whose keys and values travel made, not all; the same on all members.

        Returns:
            ``[t, heads, v]``, differentiable in the four tensors.

        Raises:
            ValueError: the tensors do not have the layout's tokens.
        """
        if q.shape[0] != layout.num_tokens:
            raise ValueError(f"{q.shape[0]} tokens were given, the layout has {layout.num_tokens}")
        how = layout, comm, self.kernel, scale, earlier, made_heads
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
        made_heads: int,
    ) -> torch.Tensor:
        projection = _Projection(weight, q, rotated, made_heads)
        dense = DenseAttention(layout, comm, kernel, scale, projection, earlier=earlier)
        out, lse = dense.forward(q, (latent, rotated))
        ctx.save_for_backward(q, latent, rotated, weight, out, lse)
        ctx.how = layout, comm, kernel, scale, earlier, made_heads
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, latent, rotated, weight, out, lse = ctx.saved_tensors
        layout, comm, kernel, scale, earlier, made_heads = ctx.how
        projection = _Projection(weight, q, rotated, made_heads, learns=ctx.needs_input_grad[3])
        dense = DenseAttention(layout, comm, kernel, scale, projection, earlier=earlier)
        dq, dlatent, drotated = dense.backward(dout, q, (latent, rotated), out, lse)
        gradients = dq, dlatent.to(latent.dtype), drotated.to(rotated.dtype), projection.dweight
        return (*gradients, None, None, None, None, None, None)


class _Projection:
    """Keys and values made of latents, and their gradients taken back.

    Args:
        weight: of the projection.
        q: ``[t, heads, d + p]``.
        rotated: ``[t, p]``.
        num_made: of the first heads that travel made.
        learns: whether the weight wants a gradient.
    """

    is_plain = False

    def __init__(
        self,
        weight: torch.Tensor,
        q: torch.Tensor,
        rotated: torch.Tensor,
        num_made: int,
        learns: bool = False,
    ) -> None:
        self.weight, self.num_made = weight, num_made
        self.num_heads, self.num_shared = q.shape[1], rotated.shape[1]
        self.num_plain = q.shape[2] - self.num_shared  # d
        self.wide = torch.promote_types(weight.dtype, torch.float32)
        self.dweight = torch.zeros_like(weight, dtype=self.wide) if learns else None

    @property
    def passing(self) -> Maker:
        """See `Source`."""
        return _Passing(self) if self.num_made else self

    def value_dim(self, keys: Keys) -> int:
        """Size of a value's head."""
        return int(self.weight.shape[0] // self.num_heads - self.num_plain)

    def sent(self, keys: Keys, made: Keys) -> Keys:
        """Latents, and behind the rotated part keys and values of the heads that travel made."""
        if not self.num_made:
            return keys
        k, v = (one[:, : self.num_made] for one in made)
        plain = k[..., : self.num_plain]
        return keys[0], torch.cat((keys[1], torch.cat((plain, v), -1).flatten(1)), -1)

    def returned(self, found: Keys) -> tuple[Keys, tuple[torch.Tensor, ...]]:
        """See `Source`."""
        if not self.num_made:
            return found, ()
        dlatent, (drotated, dmade) = found[0], self.apart(found[1])
        plain, dv = dmade.tensor_split((self.num_plain,), -1)
        return (dlatent, drotated), (plain, dv)

    def apart(self, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of what is sent beside latents the rotated part, and the heads, ``[t, made, d + v]``."""
        rotated, made = second.tensor_split((self.num_shared,), -1)
        return rotated, made.unflatten(1, (self.num_made, -1))

    def keys_and_values(
        self, latent: torch.Tensor, rotated: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``[t, heads, d + p]`` and ``[t, heads, v]``."""
        return self.with_rotated(self.project(latent, 0), rotated)

    def project(self, latent: torch.Tensor, first_head: int) -> torch.Tensor:
        """Plain part of keys, and values, of the heads from one on, ``[t, heads, d + v]``."""
        rows = first_head * (self.weight.shape[0] // self.num_heads)
        both = functional.linear(latent, self.weight[rows:])
        return both.unflatten(1, (self.num_heads - first_head, -1))

    def with_rotated(
        self, both: torch.Tensor, rotated: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all heads."""
        plain, v = both.tensor_split((self.num_plain,), -1)
        return torch.cat((plain, rotated[:, None].expand(-1, self.num_heads, -1)), -1), v

    def gradients(
        self, dk: torch.Tensor, dv: torch.Tensor, latent: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the latents ``[t, r]`` and of the rotated part ``[t, p]``; the weight's is added up.

        Args:
            dk: ``[t, heads, d + p]``.
            dv: ``[t, heads, v]``.
            latent: whose keys and values these are the gradients of.
        """
        dboth, drotated = self.together(dk, dv)
        return self.take_back(dboth, latent, 0), drotated

    def together(self, dk: torch.Tensor, dv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of what `project` gives of all heads, and of the rotated part ``[t, p]``."""
        plain, turned = dk.tensor_split((self.num_plain,), -1)
        return torch.cat((plain, dv), -1), turned.to(self.wide).sum(1)

    def take_back(self, dboth: torch.Tensor, latent: torch.Tensor, first_head: int) -> torch.Tensor:
        """The latent's gradient by what `project` gives; the weight's is added up."""
        rows, flat = first_head * (self.weight.shape[0] // self.num_heads), dboth.flatten(1)
        if self.dweight is not None:
            self.dweight[rows:] += flat.t() @ latent
        return (flat @ self.weight[rows:]).to(self.wide)


class _Passing:
    """Keys and values of latents that pass by with those of the first heads, made."""

    def __init__(self, projection: _Projection) -> None:
        self._projection, self._num_made = projection, projection.num_made

    def keys_and_values(
        self, latent: torch.Tensor, beside: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `_Projection`; of what `sent` gives."""
        rotated, made = self._projection.apart(beside)
        both = torch.cat((made, self._projection.project(latent, self._num_made)), 1)
        return self._projection.with_rotated(both, rotated)

    def gradients(
        self, dk: torch.Tensor, dv: torch.Tensor, latent: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of what `sent` gives."""
        dboth, drotated = self._projection.together(dk, dv)
        dmade, drest = dboth.tensor_split((self._num_made,), 1)
        dlatent = self._projection.take_back(drest, latent, self._num_made)
        return dlatent, torch.cat((drotated, dmade.flatten(1).to(drotated.dtype)), -1)

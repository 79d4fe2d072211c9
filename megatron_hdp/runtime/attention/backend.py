"""What an attention backend is, and what of a run it is asked to serve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_hdp.runtime.ring import EarlierKeys, RingComm, TokenLayout


class AttentionBackend(Protocol):
    """Causal attention of every sequence of a micro-batch, each within itself."""

    name: str

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
        """Attends, together with the other members of the layout's ring.

        Args:
            q: ``[t, heads, d]``, this rank's tokens in the layout's order.
            k: ``[t, kv_heads, d]``.
            v: ``[t, kv_heads, d]``; its size may differ where the run's shapes said so.
            layout: what the tokens are; equal ring slices on every member.
            comm: the HDP communicator; not used when the layout has no ring.
            scale: softmax scale, usually ``1 / sqrt(d)``.
            window: tokens that a query sees, the last of them itself; all before it unless given.
            sink: ``[heads]``; a score that stands in each query's softmax beside those of its keys
                and has no value.
            earlier: of a `PartLayout` the layer's keys of other parts; only our own ring takes it.

        Returns:
            ``[t, heads, d]``, d that of `v`, differentiable in `q`, `k`, `v` and `sink`.

        Raises:
            ValueError: the tensors do not have the layout's tokens.
        """
        ...


@dataclass(frozen=True)
class RunShapes:
    """What attention meets in a run, on one rank; the defaults are for a look at a machine."""

    device: torch.device
    """A CPU or an NVIDIA GPU."""
    dtype: torch.dtype
    """Of queries, keys and values."""
    head_dim: int
    """Size of a head of queries and keys, and of values unless `value_dim` says otherwise."""
    heads: int = 4
    """Of queries."""
    kv_heads: int = 2
    """Of keys and values."""
    longest: int = 64
    """Tokens of the longest sequence, over all members of its ring."""
    tokens_per_rank: int = 64
    """The most tokens of a micro-batch."""
    num_ranks: int = 1
    """HDP ranks: members of the largest ring that is not for another backend."""
    windows: tuple[int, ...] = ()
    """Those of layers that have one, each once."""
    sink: bool = False
    """Whether layers have a sink."""
    plain_layers: bool = True
    """Whether some layer has neither."""
    value_dim: int | None = None
    """Size of a value's head where it differs from that of queries and keys."""

    @property
    def largest_head(self) -> int:
        """Size of a head of queries, keys or values, whichever is largest."""
        return max(self.head_dim, self.value_dim or 0)

    def inputs(self, num_tokens: int) -> list[torch.Tensor]:
        """Random q, k and v, which want gradients, and the gradient of the output.

        ``[t, heads, d]`` each; draws none of the run's numbers.
        """
        value_dim = self.value_dim or self.head_dim
        sizes = [(self.heads, self.head_dim), (self.kv_heads, self.head_dim)]
        sizes += [(self.kv_heads, value_dim), (self.heads, value_dim)]
        random = torch.Generator(self.device).manual_seed(0)
        parts = [
            torch.randn(num_tokens, *size, generator=random, dtype=self.dtype, device=self.device)
            for size in sizes
        ]
        return [*(x.requires_grad_() for x in parts[:3]), parts[3]]

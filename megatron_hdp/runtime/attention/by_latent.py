"""Multi-latent attention: which rings pass on the latent, which keys and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from megatron_hdp.runtime.attention.backend import AttentionBackend, OneOfSeveral, RunShapes
from megatron_hdp.runtime.attention.selection import OUR_RING, Selection, select_attention
from megatron_hdp.runtime.ring import LatentRing, RingAttention, TokenLayout

Decision = Callable[[TokenLayout], bool]
"""Whether a micro-batch's ring passes the latent on: the same on all its members."""


class AttentionByLatent(OneOfSeveral):
    """The backend of keys and values, and beside it a ring in which their latent travels.

    Args:
        others: where keys and values travel, or nothing does.
        latent_ring: where the latent does.
        choice: "latent", "kv", or "auto": as `decide_by` says, and until then "kv".
    """

    def __init__(self, others: AttentionBackend, latent_ring: LatentRing, choice: str) -> None:
        self._others, self.latent_ring, self._choice = others, latent_ring, choice
        self._decision: Decision = lambda _: choice == "latent"
        rings = {"auto": "rings of either by their cost", "latent": "rings of latents"}[choice]
        self.name = f"{others.name}, {rings} by {latent_ring.kernel.name}"

    def decide_by(self, decision: Decision) -> None:
        """Lets a cost model decide, where the choice is left to it."""
        if self._choice == "auto":
            self._decision = decision

    def latent_travels(self, layout: TokenLayout) -> bool:
        """Whether this micro-batch is for `latent_ring`; without a ring nothing travels."""
        return layout.degree > 1 and self._decision(layout)

    def _chosen(
        self, layout: TokenLayout, window: int | None, sink: torch.Tensor | None
    ) -> AttentionBackend:
        """Where it is called with keys and values, these travel."""
        return self._others


def with_latent_ring(
    selection: Selection,
    choice: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    shapes: RunShapes,
) -> Selection:
    """The selection, with a ring for latents beside it.

    Args:
        selection: for keys and values.
        choice: as of `AttentionByLatent`; with "kv" the selection stays as it is.
        device: as in `select_attention`.
        dtype: as in `select_attention`.
        head_dim: as in `select_attention`.
        shapes: as in `select_attention`.

    Raises:
        ValueError: there is no kernel for our ring; says why.
    """
    if choice == "kv":
        return selection
    ours = selection
    if not isinstance(selection.backend, RingAttention):
        ours = select_attention(device, dtype, head_dim, OUR_RING, shapes=shapes)
    assert isinstance(ours.backend, RingAttention), "our own ring is made of a block kernel"
    return replace(
        selection,
        backend=AttentionByLatent(selection.backend, LatentRing(ours.backend.kernel), choice),
        refused=selection.refused | ours.refused,
    )

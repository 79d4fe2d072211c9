"""Two attention backends in one run: layers with a window or a sink by our own ring.

TransformerEngine's rings know neither, and its attention gives no log-sum-exp to add a sink to.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron_hdp.runtime.attention.backend import AttentionBackend, OneOfSeveral, RunShapes
from megatron_hdp.runtime.attention.selection import OUR_RING, Selection, select_attention
from megatron_hdp.runtime.ring import RingAttention, TokenLayout


class AttentionByLayer(OneOfSeveral):
    """Layers with a window or a sink by one backend, all others by another.

    All ranks that run a layer choose the same.

    Args:
        plain: of layers with neither.
        others: of the rest.
    """

    def __init__(self, plain: AttentionBackend, others: AttentionBackend) -> None:
        self._plain, self._others = plain, others
        self.name = f"{plain.name}, layers with a window or a sink by {others.name}"

    def _chosen(
        self, layout: TokenLayout, window: int | None, sink: torch.Tensor | None
    ) -> AttentionBackend:
        return self._plain if window is None and sink is None else self._others


def with_own_ring(
    selection: Selection, device: torch.device, dtype: torch.dtype, head_dim: int, shapes: RunShapes
) -> Selection:
    """The selection, with layers that have a window or a sink by our own ring.

    Args:
        selection: for all else; if it is our own ring already, it stays as it is.
        device: as in `select_attention`.
        dtype: as in `select_attention`.
        head_dim: as in `select_attention`.
        shapes: as in `select_attention`.

    Raises:
        ValueError: there is no kernel for our ring; says why.
    """
    if isinstance(selection.backend, RingAttention) or not (shapes.windows or shapes.sink):
        return selection
    ours = select_attention(device, dtype, head_dim, OUR_RING, shapes=shapes)
    refused = selection.refused | ours.refused
    if not shapes.plain_layers:
        why = "every layer has a window or a sink, and its rings know neither"
        return replace(ours, refused={selection.backend.name: why} | refused)
    backend = AttentionByLayer(selection.backend, ours.backend)
    return replace(selection, backend=backend, refused=refused)

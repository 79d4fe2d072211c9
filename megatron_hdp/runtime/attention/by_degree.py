"""Two attention backends in one run: long rings by another than the rest."""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron_hdp.runtime.attention.backend import AttentionBackend, OneOfSeveral, RunShapes
from megatron_hdp.runtime.attention.selection import OUR_RING, Selection, select_attention
from megatron_hdp.runtime.ring import RingAttention, TokenLayout


class AttentionByDegree(OneOfSeveral):
    """Micro-batches whose ring has many ranks by one backend, all others by another.

    A ring's members see the same degree, so they choose the same.

    Args:
        others: of short rings and whole sequences.
        long_rings: of rings of `least_degree` ranks and more, and of what lies beside them.
        least_degree: at least 2.
    """

    def __init__(
        self, others: AttentionBackend, long_rings: AttentionBackend, least_degree: int
    ) -> None:
        self._others, self._long_rings, self._least_degree = others, long_rings, least_degree
        self.name = f"{others.name}, rings of {least_degree} ranks and more by {long_rings.name}"

    def _chosen(
        self, layout: TokenLayout, window: int | None, sink: torch.Tensor | None
    ) -> AttentionBackend:
        return self._long_rings if layout.degree >= self._least_degree else self._others


def with_float32_rings(
    selection: Selection,
    least_degree: int | None,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    shapes: RunShapes,
) -> Selection:
    """The selection, with long rings by our own ring, which adds up in float32.

    Args:
        selection: for all else; if it is our own ring already, it stays as it is.
        least_degree: of long rings; without it the selection stays as it is.
        device: as in `select_attention`.
        dtype: as in `select_attention`.
        head_dim: as in `select_attention`.
        shapes: as in `select_attention`.

    Raises:
        ValueError: there is no kernel for our ring; says why.
    """
    if least_degree is None or isinstance(selection.backend, RingAttention):
        return selection
    ours = select_attention(device, dtype, head_dim, OUR_RING, shapes=shapes)
    return replace(
        selection,
        backend=AttentionByDegree(selection.backend, ours.backend, least_degree),
        refused=selection.refused | ours.refused,
    )

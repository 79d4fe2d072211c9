"""Attention backends: which one a run uses, and TransformerEngine's own.

Design: `docs/design/gpu.md`.
"""

from megatron_hdp.runtime.attention.backend import AttentionBackend, RunShapes
from megatron_hdp.runtime.attention.selection import Selection, select_attention
from megatron_hdp.runtime.attention.several import (
    AttentionByLatent,
    with_double_rings,
    with_float32_rings,
    with_latent_ring,
    with_own_ring,
    with_parts,
)

__all__ = [
    "AttentionBackend",
    "AttentionByLatent",
    "RunShapes",
    "Selection",
    "select_attention",
    "with_double_rings",
    "with_float32_rings",
    "with_latent_ring",
    "with_own_ring",
    "with_parts",
]

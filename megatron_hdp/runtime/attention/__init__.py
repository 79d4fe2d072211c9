"""Attention backends: which one a run uses, and TransformerEngine's own.

Design: `docs/design/gpu.md`.
"""

from megatron_hdp.runtime.attention.backend import AttentionBackend, RunShapes
from megatron_hdp.runtime.attention.by_degree import with_float32_rings
from megatron_hdp.runtime.attention.by_latent import AttentionByLatent, with_latent_ring
from megatron_hdp.runtime.attention.by_layer import with_own_ring
from megatron_hdp.runtime.attention.selection import Selection, select_attention

__all__ = [
    "AttentionBackend",
    "AttentionByLatent",
    "RunShapes",
    "Selection",
    "select_attention",
    "with_float32_rings",
    "with_latent_ring",
    "with_own_ring",
]

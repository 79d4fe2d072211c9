"""Attention backends: which one a run uses, and TransformerEngine's own."""

from megatron_hdp.runtime.attention.backend import AttentionBackend, RunShapes
from megatron_hdp.runtime.attention.selection import Selection, select_attention

__all__ = [
    "AttentionBackend",
    "RunShapes",
    "Selection",
    "select_attention",
]

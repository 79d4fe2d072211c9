"""Attention backends: which one a run uses, and TransformerEngine's own."""

from megatron_hdp.runtime.attention.selection import AttentionBackend, Selection, select_attention

__all__ = [
    "AttentionBackend",
    "Selection",
    "select_attention",
]

"""Megatron-Bridge's own training loop under HDP: its batches, planned over all ranks.

`activate` before Bridge's ``pretrain``, ``finetune`` or ``train``; nothing else changes.
"""

from megatron_hdp.bridge.patches import activate, deactivate

__all__ = ["activate", "deactivate"]

"""Checkpoints of our own command: what they hold, and when one becomes visible."""

from megatron_hdp.megatron.checkpoint.checkpoints import Checkpoints, Progress, TrainingState

__all__ = [
    "Checkpoints",
    "Progress",
    "TrainingState",
]

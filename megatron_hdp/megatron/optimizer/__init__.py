"""Megatron's optimizer: how it is built, and its state in forms that any ranks can load."""

from megatron_hdp.megatron.optimizer import torch_adam
from megatron_hdp.megatron.optimizer.building import build_optimizer, build_scheduler
from megatron_hdp.megatron.optimizer.parts import laid_out, settings
from megatron_hdp.megatron.optimizer.whole_state import gather_whole_states

__all__ = [
    "build_optimizer",
    "build_scheduler",
    "gather_whole_states",
    "laid_out",
    "settings",
    "torch_adam",
]

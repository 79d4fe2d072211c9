"""Megatron's optimizer: how it is built, and its state in forms that any ranks can load."""

from megatron_hdp.megatron.optimizer import torch_adam
from megatron_hdp.megatron.optimizer.building import build_optimizer, build_scheduler
from megatron_hdp.megatron.optimizer.parts import laid_out, settings
from megatron_hdp.megatron.optimizer.shard_copies import (
    Held,
    ShardCopies,
    restore,
)
from megatron_hdp.megatron.optimizer.whole_state import gather_whole_states
from megatron_hdp.runtime.copies import Chosen, choose_common, choose_version

__all__ = [
    "Chosen",
    "Held",
    "ShardCopies",
    "build_optimizer",
    "build_scheduler",
    "choose_common",
    "choose_version",
    "gather_whole_states",
    "laid_out",
    "restore",
    "settings",
    "torch_adam",
]

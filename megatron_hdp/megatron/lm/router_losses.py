"""Hands the losses of HDP's routers to Megatron-LM's log, as means over tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.moe.moe_utils import save_to_aux_losses_tracker

from megatron_hdp.megatron.model import HdpRouter
from megatron_hdp.megatron.parallel import compute_device


class RouterLosses:
    """The routers of this rank's model chunks, and what they added to the loss of a step."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._routers = [
            one for chunk in chunks for one in chunk.modules() if isinstance(one, HdpRouter)
        ]

    def begin_step(self) -> None:
        """Forgets what was noted before."""
        for router in self._routers:
            router.losses.clear()

    def log(self, num_tokens: int, num_layers: int) -> None:
        """Puts the step's losses where Megatron's log looks for them; every rank must call this.

        Args:
            num_tokens: of the global batch, padding not counted.
            num_layers: of the whole model, MTP layers included.
        """
        # Megatron divides by its own number of micro-batches of a step
        scale = get_num_microbatches() / max(num_tokens, 1)
        for router in self._routers:
            for name, value in sorted(router.losses.items()):
                total = self._over_ranks(router, value) * scale
                save_to_aux_losses_tracker(name, total, router.layer_number, num_layers)
        self.begin_step()

    def _over_ranks(self, router: Any, value: torch.Tensor) -> torch.Tensor:
        total = value.to(compute_device(), torch.float32)
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        if router.config.sequence_parallel:  # else tensor-parallel ranks see the same tokens
            dist.all_reduce(total, group=parallel_state.get_tensor_model_parallel_group())
        return total

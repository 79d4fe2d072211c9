"""What differs between the releases of megatron-core that HDP runs on, 0.16.1 to 0.19.

Each function asks for what is there instead of comparing versions, so a release in between works
as well. What the plugin replaces in Megatron-LM's training loop is declared in `lm.replacements`.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.optimizer import MegatronOptimizer


def submodules_of(specification: Any) -> Any:
    """The submodules of a layer's part: 0.18 hands a ``partial`` where a ``ModuleSpec`` was."""
    if isinstance(specification, functools.partial):
        return specification.keywords["submodules"]
    return specification.submodules


def gradients_in_norm(part: MegatronOptimizer) -> list[torch.Tensor]:
    """The gradients that count in the norm, replicas left out; 0.19 renamed the method."""
    renamed = getattr(part, "get_grads_for_grad_norm", None)
    return list(renamed() if renamed else part.get_main_grads_for_grad_norm())


def own_checkpoint_writer() -> dict[str, str]:
    """Arguments of ``dist_checkpointing.save`` for megatron-core's own writer.

    From 0.17 on, saving asynchronously goes by default through nvidia-resiliency-ext, which keeps a
    server process of its own.
    """
    known = inspect.signature(dist_checkpointing.save).parameters
    return {"async_strategy": "mcore"} if "async_strategy" in known else {}

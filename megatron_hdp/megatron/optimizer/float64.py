"""Keeps Megatron's optimizer in float64 (``--fp64``), so that two runs can be shown to be equal.

Megatron computes the gradient norm in float32, and its distributed optimizer hands gradients to
Adam as float32. Nothing is patched: the two methods are overridden on the instances of a run that
asked for float64.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_hdp.megatron.releases import gradients_in_norm


def keep_float64(optimizer: MegatronOptimizer) -> None:
    """Overrides what would lower the precision of `optimizer`, whose parameters are float64."""
    optimizer.get_grad_norm = lambda: _grad_norm(optimizer)
    for part in optimizer.chained_optimizers:
        if isinstance(part, DistributedOptimizer) and not part.is_stub_optimizer:
            _keep_gradients(part)


def _grad_norm(optimizer: MegatronOptimizer) -> float:
    """The norm of all gradients; each part sums over the ranks that share its parameters."""
    total: float = 0.0
    for part in optimizer.chained_optimizers:
        square = torch.zeros((), dtype=torch.float64)
        for grad in gradients_in_norm(part):
            square += grad.square().sum()
        dist.all_reduce(square, group=part.get_grad_stats_parallel_group())
        total += square.item()
    return math.sqrt(total)


def _keep_gradients(part: DistributedOptimizer) -> None:
    def copy_model_grads_to_main_grads() -> None:
        for models, shards in zip(part.model_fp32_groups, part.shard_fp32_groups, strict=True):
            for parameter, shard in zip(models, shards, strict=True):
                mine = part._get_model_param_range_map(parameter)["param"]
                shard.grad = parameter.main_grad.view(-1)[mine.start : mine.end]

    part._copy_model_grads_to_main_grads = copy_model_grads_to_main_grads

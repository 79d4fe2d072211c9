"""Megatron's optimizer and learning-rate schedule from training arguments."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_hdp.megatron.model import model_dtype
from megatron_hdp.megatron.optimizer.torch_adam import without_parameters
from megatron_hdp.megatron.optimizer.whole_state import gather_whole_states
from megatron_hdp.megatron.options import TrainingArguments
from megatron_hdp.megatron.releases import gradients_in_norm


def build_optimizer(
    arguments: TrainingArguments, chunks: list[DistributedDataParallel]
) -> MegatronOptimizer:
    """Adam as Megatron configures it, for all of a rank's parts of the model.

    ZeRO-1 with ``--use-distributed-optimizer``.
    """
    config = OptimizerConfig(
        optimizer="adam",
        lr=arguments.lr,
        min_lr=arguments.min_lr,
        weight_decay=arguments.weight_decay,
        adam_beta1=arguments.adam_beta1,
        adam_beta2=arguments.adam_beta2,
        adam_eps=arguments.adam_eps,
        clip_grad=arguments.clip_grad or math.inf,  # no clipping, but the norm is reported
        bf16=arguments.bf16,
        params_dtype=model_dtype(arguments),
        use_distributed_optimizer=arguments.use_distributed_optimizer,
        overlap_param_gather=arguments.overlap_param_gather,
    )
    optimizer = get_megatron_optimizer(config, chunks)
    gather_whole_states(optimizer)
    without_parameters(optimizer)
    if arguments.fp64:
        _keep_float64(optimizer)
    return optimizer


def build_scheduler(
    arguments: TrainingArguments, optimizer: MegatronOptimizer
) -> OptimizerParamScheduler:
    """The learning-rate schedule, counted in iterations."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=arguments.lr,
        min_lr=arguments.min_lr,
        lr_warmup_steps=arguments.lr_warmup_iters,
        lr_decay_steps=arguments.lr_decay_iters or arguments.train_iters,
        lr_decay_style=arguments.lr_decay_style,
        start_wd=arguments.weight_decay,
        end_wd=arguments.weight_decay,
        wd_incr_steps=arguments.lr_decay_iters or arguments.train_iters,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=arguments.override_opt_param_scheduler,
    )


def _keep_float64(optimizer: MegatronOptimizer) -> None:
    """Keeps `optimizer` in float64 (``--fp64``), so that two runs can be shown to be equal.

    Megatron computes the gradient norm in float32, and its distributed optimizer hands gradients to
    Adam as float32. Nothing is patched: both methods are overridden on the instances.
    """
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

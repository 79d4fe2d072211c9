"""Weights and optimizer of those who were in a job, given to those who enter it anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.optimizer import torch_adam
from megatron_hdp.megatron.world.replicated import CarriedState, adams_of


def give_state(
    chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer | None, source: int
) -> None:
    """Gives every rank what the HDP rank `source` has at its place among tensor and pipeline ranks.

    Experts that are spread over HDP ranks come from those that share them with `source`. Every rank
    of the job must call this. An optimizer is one that each rank has whole.
    """
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if group.size() == 1:
        return
    sender = dist.get_process_group_ranks(group)[source]
    _take_over_types(chunks, sender, group)
    experts = parallel_state.get_expert_data_parallel_group()
    sender_of_experts = dist.get_process_group_ranks(experts)[_copy_of_experts(source)]
    tensors = list(_of_model(chunks))
    settings: list[Any] = []
    if optimizer is not None:
        for adam in adams_of(optimizer):
            _begin_state(adam)
        state = CarriedState(optimizer)
        tensors += [(one, is_spread) for one, is_spread in state.tensors() if one.dim()]
        settings = state.settings()
    seen: set[int] = set()
    for one, is_spread in tensors:
        if one.data_ptr() in seen:  # without float32 copies, weights are the optimizer's
            continue
        seen.add(one.data_ptr())
        if is_spread:
            dist.broadcast(one, sender_of_experts, experts)
        else:
            dist.broadcast(one, sender, group)
    shared = [settings]
    device = tensors[0][0].device if tensors else None
    dist.broadcast_object_list(shared, sender, group, device)
    if optimizer is not None:
        state.set_settings(shared[0])


def _begin_state(adam: torch.optim.Optimizer) -> None:
    """What Adam makes in its first step, as of none; fused ones count steps in their settings."""
    if not adam.state:
        torch_adam.create_state(adam)
        for state in adam.state.values():
            if "step" in state:
                state["step"].zero_()


def _take_over_types(
    chunks: Sequence[DistributedDataParallel], sender: int, group: dist.ProcessGroup
) -> None:
    """Gives buffers the sender's types: that of an expert bias changes in Megatron's forward."""
    shared = [[{name: one.dtype for name, one in each.module.named_buffers()} for each in chunks]]
    dist.broadcast_object_list(shared, sender, group)
    for chunk, types in zip(chunks, shared[0], strict=True):
        for name, buffer in list(chunk.module.named_buffers()):
            if buffer.dtype != types[name]:
                owner, _, attribute = name.rpartition(".")
                setattr(chunk.module.get_submodule(owner), attribute, buffer.to(types[name]))


def _of_model(chunks: Sequence[DistributedDataParallel]) -> Iterator[tuple[torch.Tensor, bool]]:
    """Weights, and buffers that training changes, as the expert bias, as `CarriedState.tensors`."""
    for chunk in chunks:
        for parameter in chunk.module.parameters():
            yield parameter.data, parallel.is_spread_expert(parameter)
        for buffer in chunk.module.buffers():
            if buffer.numel():
                yield buffer, False


def _copy_of_experts(hdp_rank: int) -> int:
    """Which of the copies of all experts an HDP rank belongs to, the first one inside of it."""
    tensor_ranks = parallel_state.get_tensor_model_parallel_world_size()
    ranks_of_stage = parallel_state.get_data_parallel_world_size() * tensor_ranks
    ranks_of_copy = ranks_of_stage // parallel_state.get_expert_data_parallel_group().size()
    return int(hdp_rank * tensor_ranks // ranks_of_copy)

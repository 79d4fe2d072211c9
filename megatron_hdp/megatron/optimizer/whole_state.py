"""Gathers the distributed optimizer's state for a checkpoint, each parameter's at its own place.

Megatron's own gathering leaves out the padding at the end of each gradient bucket, and then looks
parameters up where they lie with the padding: with more than one bucket (``--overlap-grad-reduce``)
it saves shifted states. It also saves float64 as float32. Nothing is patched: the method is
overridden on the instance.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

_KEYS = ("param", "exp_avg", "exp_avg_sq")


def gather_whole_states(optimizer: MegatronOptimizer) -> None:
    """Makes the sharded state dicts of `optimizer` right for any number of buckets."""
    for part in optimizer.chained_optimizers:
        if isinstance(part, DistributedOptimizer) and not part.is_stub_optimizer:
            _override(part)


def _override(part: DistributedOptimizer) -> None:
    def get_parameter_state_dp_zero(
        use_gloo_comm: bool = True, empty_data: bool = False, return_on_all_ranks: bool = False
    ) -> dict[Any, Any]:
        assert return_on_all_ranks and not use_gloo_comm, "checkpoint.py asks for whole states"
        state: dict[Any, Any] = {}
        for index, buffer_ranges in enumerate(part.gbuf_ranges):
            ((dtype, bucket_ranges),) = buffer_ranges.items()
            state[index] = {dtype: _buffer_state(part, index, bucket_ranges, empty_data)}
        return state

    part.get_parameter_state_dp_zero = get_parameter_state_dp_zero


def _buffer_state(
    part: DistributedOptimizer, index: int, bucket_ranges: list[Any], empty_data: bool
) -> dict[str, torch.Tensor]:
    """Each kind of state over a whole buffer, padding included; every rank of the group calls."""
    buffer = part.buffers[index]
    dtype = torch.promote_types(buffer.param_dtype, torch.float32)  # the main parameters'
    whole = {key: torch.zeros(buffer.numel, dtype=dtype) for key in _KEYS}
    if empty_data:
        return whole
    num_ranks = part.data_parallel_group.size()
    for bucket, ranges in zip(buffer.buckets, bucket_ranges, strict=True):
        numel = bucket.grad_data.numel()
        states = [
            (place["gbuf_local"], part._get_main_param_and_optimizer_states(parameter))
            for parameter, place in ranges["param_map"].items()
        ]
        for key in _KEYS:
            device = bucket.grad_data.device
            shard = torch.zeros(numel // num_ranks, dtype=dtype, device=device)
            for place, state in states:
                shard[place.start : place.end] = state[key].detach()
            gathered = torch.empty(numel, dtype=dtype, device=device)
            dist.all_gather_into_tensor(gathered, shard, group=part.data_parallel_group)
            whole[key][bucket.offset : bucket.offset + numel] = gathered
    return whole

"""Collectives as megatron-core calls them on GPUs, over gloo, which differs in what it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def barrier(*args: Any, device_ids: Any = None, **kwargs: Any) -> Any:
    """`dist.barrier`; gloo knows no device ids."""
    return dist.barrier(*args, **kwargs)


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    **kwargs: Any,
) -> Any:
    """`dist.all_to_all_single`; Megatron takes sizes off the GPU, on a CPU they stay tensors."""
    splits = (_as_list(output_split_sizes), _as_list(input_split_sizes))
    return dist.all_to_all_single(output, input, *splits, **kwargs)


def all_gather(tensors: Sequence[torch.Tensor], tensor: torch.Tensor, *args: Any, **kw: Any) -> Any:
    """`dist.all_gather`; parts of different lengths travel padded."""
    longest = max(len(part) for part in tensors)
    if all(len(part) == longest for part in tensors):
        return dist.all_gather(tensors, tensor, *args, **kw)
    padded = tensor.new_zeros(longest, *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    received = [torch.empty_like(padded) for _ in tensors]
    dist.all_gather(received, padded, *args, **kw)
    for part, arrived in zip(tensors, received, strict=True):
        part.copy_(arrived[: len(part)])
    return None


def reduce_scatter(
    output: torch.Tensor, inputs: Sequence[torch.Tensor], *args: Any, **kw: Any
) -> Any:
    """`dist.reduce_scatter`; parts of different lengths travel padded."""
    longest = max(len(part) for part in inputs)
    if all(len(part) == longest for part in inputs):
        return dist.reduce_scatter(output, list(inputs), *args, **kw)
    padded = [part.new_zeros(longest, *part.shape[1:]) for part in inputs]
    for whole, part in zip(padded, inputs, strict=True):
        whole[: len(part)] = part
    received = torch.empty_like(padded[0])
    dist.reduce_scatter(received, padded, *args, **kw)
    output.copy_(received[: len(output)])
    return None


def _as_list(sizes: Any) -> Any:
    return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes

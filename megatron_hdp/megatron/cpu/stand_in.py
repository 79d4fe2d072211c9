"""A stand-in for ``torch`` whose CUDA functions and tensor factories answer for the CPU.

Its collectives take over gloo what megatron-core gives them on GPUs.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

_FACTORIES = (
    *("empty", "empty_like", "empty_strided", "full", "full_like", "ones", "ones_like"),
    *("zeros", "zeros_like", "arange", "eye", "linspace", "rand", "randint", "randn", "tensor"),
)

# What Megatron's optimizers may see; float64 (exactness tests) counts as full precision.
_CUDA_TYPE_NAMES = {
    torch.float16: "torch.cuda.HalfTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
    torch.float32: "torch.cuda.FloatTensor",
    torch.float64: "torch.cuda.FloatTensor",
}

_CPU = torch.device("cpu")


class StandIn(types.ModuleType):
    """A module that answers from `overrides` first and from `target` for everything else."""

    def __init__(self, target: Any, overrides: dict[str, Any]) -> None:
        super().__init__(target.__name__)
        self.__dict__.update(overrides)
        self.__dict__["_target"] = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_target"], name)


class NoStream:
    """Stands for a CUDA stream or event: work on the CPU is done when the call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = _CPU

    def _do_nothing(self, *args: Any, **kwargs: Any) -> None:
        return None

    record = wait = synchronize = wait_event = wait_stream = _do_nothing

    def record_event(self, event: Any = None) -> Any:
        """Return the event, which has happened."""
        return event if event is not None else NoStream()

    def query(self) -> bool:
        """Return whether the work is done."""
        return True

    def __enter__(self) -> NoStream:
        return self

    def __exit__(self, *exc: object) -> None:
        return None


def nothing(*args: Any, **kwargs: Any) -> None:
    """Takes what a CUDA function takes."""


def _get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(new_state)


RNG_FUNCTIONS = {
    "_get_cuda_rng_state": _get_rng_state,
    "_set_cuda_rng_state": _set_rng_state,
}


def _cpu_factory(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("pin_memory", None)
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return on_cpu


def _softmax(
    input: torch.Tensor, dim: int, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any
) -> torch.Tensor:
    if dtype == torch.float32 and input.dtype == torch.float64:
        dtype = torch.float64
    return torch.softmax(input, dim, *args, dtype=dtype, **kwargs)


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


def stand_in_for_torch() -> StandIn:
    """What Megatron's modules see as ``torch``."""
    random = StandIn(
        torch.cuda.random, {"get_rng_state": _get_rng_state, "set_rng_state": _set_rng_state}
    )
    nvtx = StandIn(
        torch.cuda.nvtx,
        {"range_push": nothing, "range_pop": nothing, "range": contextlib.nullcontext},
    )
    cuda = StandIn(
        torch.cuda,
        {
            **dict.fromkeys(("set_device", "synchronize", "empty_cache", "set_stream"), nothing),
            **dict.fromkeys(("Stream", "Event", "current_stream", "default_stream"), NoStream),
            "current_device": lambda: _CPU,
            "stream": contextlib.nullcontext,
            "manual_seed": torch.default_generator.manual_seed,
            "get_rng_state": _get_rng_state,
            "set_rng_state": _set_rng_state,
            "random": random,
            "nvtx": nvtx,
        },
    )
    overrides: dict[str, Any] = {name: _cpu_factory(getattr(torch, name)) for name in _FACTORIES}
    overrides["cuda"] = cuda
    collectives = (barrier, all_to_all_single, all_gather, reduce_scatter)
    overrides["distributed"] = StandIn(dist, {one.__name__: one for one in collectives})
    overrides["softmax"] = _softmax
    return StandIn(torch, overrides)


def with_a_device(stand_in: StandIn) -> StandIn:
    """A stand-in for torch that also claims a device of the oldest kind that Megatron knows."""
    cuda = StandIn(
        stand_in.cuda,
        {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "get_device_capability": lambda *args: (7, 0),
            "get_device_properties": lambda *args: types.SimpleNamespace(major=7, minor=0),
        },
    )
    return StandIn(stand_in, {"cuda": cuda})


def type_seen_by_megatron(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Tensor.type`` that answers Megatron, which sorts parameters by it, as on a GPU."""

    @functools.wraps(original)
    def tensor_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if args or kwargs or not caller.startswith("megatron."):
            return original(self, *args, **kwargs)
        return _CUDA_TYPE_NAMES.get(self.dtype) or original(self)

    return tensor_type


def float_seen_by_routers(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Tensor.float`` that leaves Megatron's routers float64, where they ask for float32."""

    @functools.wraps(original)
    def tensor_float(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if self.dtype == torch.float64 and caller.startswith("megatron.core.transformer.moe."):
            return self
        return original(self, *args, **kwargs)

    return tensor_float

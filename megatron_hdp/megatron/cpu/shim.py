"""Lets megatron-core, which assumes CUDA, run on a machine without a GPU.

Megatron's own modules see a forwarding stand-in for ``torch`` whose CUDA functions and tensor
factories answer for the CPU; everybody else keeps the real ``torch``. Five methods of tensors
and modules cannot be replaced for Megatron alone and are replaced globally. `REDIRECTS` names all,
``megatron-hdp doctor`` prints it. `apply` refuses to run where there is a GPU.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import logging
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

from megatron_hdp.megatron.cpu import gpu_gaps
from megatron_hdp.megatron.cpu.stand_in import (
    RNG_FUNCTIONS,
    NoStream,
    float_seen_by_routers,
    nothing,
    stand_in_for_torch,
    type_seen_by_megatron,
    with_a_device,
)
from megatron_hdp.overrides import Overrides

REDIRECTS = {
    "torch factories inside megatron.*": "device='cuda' becomes the CPU, pin_memory is dropped",
    "torch.cuda inside megatron.*": "devices, streams, events, RNG, nvtx answer for the CPU",
    "torch.cuda inside megatron.training.*, megatron.bridge.training.*": "says besides that there "
    "is one device, as training loops refuse to start without",
    "megatron.legacy.fused_kernels.load": "compiles no CUDA kernels",
    "torch.distributed.barrier inside megatron.*": "device_ids is dropped (gloo knows none)",
    "torch.distributed.all_to_all_single inside megatron.*": "split sizes become integers",
    "torch.distributed.all_gather, .reduce_scatter inside megatron.*": "parts of different lengths "
    "are padded (gloo wants equal ones)",
    "torch.softmax inside megatron.*": "float64 stays float64 where float32 is asked for (routers)",
    "megatron.core.tensor_parallel.random": "CUDA RNG state is the CPU generator's",
    **gpu_gaps.GAPS,
    "MoEAlltoAllTokenDispatcher.cuda_dtoh_stream": "a stream without work, gone with the shim",
    "Tensor.cuda, Module.cuda, Tensor.record_stream": "no-ops",
    "Tensor.float, called by megatron.core.transformer.moe.*": "float64 stays float64 (routers)",
    "Tensor.type, called by megatron.*": "answers torch.cuda.*Tensor, by which optimizers sort",
}

_RNG_MODULE = "megatron.core.tensor_parallel.random"
_DISPATCHERS = "megatron.core.transformer.moe.token_dispatcher"
_FUSED_KERNELS = "megatron.legacy.fused_kernels"
_TRAININGS = ("megatron.training", "megatron.bridge.training")
_RNG_WARNING = "CPU RNG state changed within GPU RNG context"


def _without_rng_warning(record: logging.LogRecord) -> bool:
    return _RNG_WARNING not in record.getMessage()


class _Shim(importlib.abc.MetaPathFinder):
    """Everything `apply` changes; as an import hook it also reaches modules loaded later."""

    def __init__(self) -> None:
        self._torch = stand_in_for_torch()
        self._torch_of_training = with_a_device(self._torch)
        self._overrides = Overrides()
        self.replace = self._overrides.set
        sys.meta_path.insert(0, self)
        logging.getLogger(_RNG_MODULE).addFilter(_without_rng_warning)
        try:
            for name, module in list(sys.modules.items()):
                if name.startswith("megatron.") and isinstance(module, types.ModuleType):
                    self.enter_module(module)
            self.replace_methods()
        except BaseException:
            self.remove()
            raise

    def enter_module(self, module: types.ModuleType) -> None:
        names = vars(module)
        name = names.get("__name__", "")
        if names.get("torch") is torch:
            in_training = any(f"{name}.".startswith(f"{one}.") for one in _TRAININGS)
            self.replace(module, "torch", self._torch_of_training if in_training else self._torch)
        if name == _FUSED_KERNELS:
            self.replace_in(module, "load", nothing)
        elif name == _RNG_MODULE:
            for function, value in RNG_FUNCTIONS.items():
                self.replace_in(module, function, value)
        elif gap := gpu_gaps.gap_of(module):
            self.replace(module, *gap)
        elif name == _DISPATCHERS:
            dispatcher = names.get("MoEAlltoAllTokenDispatcher", module)
            self.replace_in(dispatcher, "cuda_dtoh_stream", NoStream())

    def replace_in(self, owner: Any, name: str, value: Any) -> None:
        """`replace` what must be there already."""
        if name not in vars(owner):
            raise RuntimeError(
                f"the CPU shim expected {owner.__name__}.{name} and did not find it: this "
                "megatron-core is not supported without a GPU, see megatron-hdp doctor"
            )
        self.replace(owner, name, value)

    def replace_methods(self) -> None:
        def stay(self: Any, *args: Any, **kwargs: Any) -> Any:
            return self

        # Tensor inherits these four; an override on Tensor hides them.
        self.replace(torch.Tensor, "cuda", stay)
        self.replace(torch.Tensor, "record_stream", nothing)
        self.replace(torch.Tensor, "float", float_seen_by_routers(torch.Tensor.float))
        self.replace(torch.Tensor, "type", type_seen_by_megatron(torch.Tensor.type))
        self.replace(torch.nn.Module, "cuda", stay)

    def remove(self) -> None:
        if foreign := self._overrides.foreign():
            raise RuntimeError(
                f"{', '.join(foreign)} changed after the CPU shim was applied: undo that first"
            )
        logging.getLogger(_RNG_MODULE).removeFilter(_without_rng_warning)
        sys.meta_path.remove(self)
        self._overrides.undo()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Wraps the loader of a megatron module so that it enters the shim once it is loaded."""
        if not name.startswith("megatron."):
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    self._follow(spec.loader)
                return spec
        return None

    def _follow(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            self.enter_module(module)

        self.replace(loader, "exec_module", exec_module)


_active: _Shim | None = None


def needed() -> bool:
    """True where torch finds no GPU."""
    return not torch.cuda.is_available()


def is_active() -> bool:
    """True between `apply` and `revert`."""
    return _active is not None


def apply() -> None:
    """Puts the shim in place; a second call does nothing.

    Raises:
        RuntimeError: there is a GPU, where Megatron needs no shim.
    """
    global _active
    if _active is not None:
        return
    if not needed():
        raise RuntimeError("the CPU shim was asked for, but torch.cuda.is_available() is true")
    _active = _Shim()


def revert() -> None:
    """Restores every original; does nothing when the shim is not in place.

    Raises:
        RuntimeError: somebody replaced after us what the shim had replaced; nothing is restored.
    """
    global _active
    if _active is not None:
        _active.remove()
        _active = None


@contextlib.contextmanager
def applied() -> Iterator[None]:
    """`apply` for the length of a with-block."""
    apply()
    try:
        yield
    finally:
        revert()

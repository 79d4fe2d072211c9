"""Lets megatron-core, which assumes CUDA, run on a machine without a GPU.

Megatron's own modules see a forwarding stand-in for ``torch`` whose CUDA functions and tensor
factories answer for the CPU; everybody else keeps the real ``torch``. Four methods of tensors
and modules cannot be replaced for Megatron alone and are replaced globally. `REDIRECTS` names all,
``megatron-hdp doctor`` prints it. `apply` refuses to run where there is a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import logging
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megatron_hdp.megatron import cpu_collectives

REDIRECTS = {
    "torch factories inside megatron.*": "device='cuda' becomes the CPU, pin_memory is dropped",
    "torch.cuda inside megatron.*": "devices, streams, events, RNG, nvtx answer for the CPU",
    "torch.cuda inside megatron.training.*": "says besides that there is one device, as Megatron's "
    "training loop refuses to start without",
    "megatron.legacy.fused_kernels.load": "compiles no CUDA kernels",
    "torch.distributed.barrier inside megatron.*": "device_ids is dropped (gloo knows none)",
    "torch.distributed.all_to_all_single inside megatron.*": "split sizes become integers",
    "torch.distributed.all_gather, .reduce_scatter inside megatron.*": "parts of different lengths "
    "are padded (gloo wants equal ones)",
    "torch.softmax inside megatron.*": "float64 stays float64 where float32 is asked for (routers)",
    "megatron.core.tensor_parallel.random": "CUDA RNG state is the CPU generator's",
    "megatron.core.transformer.moe.moe_utils.te_general_gemm": "None where TransformerEngine is "
    "missing; Megatron 0.16 tests it without having defined it",
    "MoEAlltoAllTokenDispatcher.cuda_dtoh_stream": "a stream without work, gone with the shim",
    "Tensor.cuda, Module.cuda, Tensor.record_stream": "no-ops",
    "Tensor.type, called by megatron.*": "answers torch.cuda.*Tensor, by which optimizers sort",
}

_FACTORIES = [
    "arange",
    "empty",
    "empty_like",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "linspace",
    "ones",
    "ones_like",
    "rand",
    "randint",
    "randn",
    "tensor",
    "zeros",
    "zeros_like",
]

# What Megatron's optimizers may see; float64 (exactness tests) counts as full precision.
_CUDA_TYPE_NAMES = {
    torch.float16: "torch.cuda.HalfTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
    torch.float32: "torch.cuda.FloatTensor",
    torch.float64: "torch.cuda.FloatTensor",
}

_CPU = torch.device("cpu")
_RNG_MODULE = "megatron.core.tensor_parallel.random"
_MOE_UTILS = "megatron.core.transformer.moe.moe_utils"
_DISPATCHERS = "megatron.core.transformer.moe.token_dispatcher"
_FUSED_KERNELS = "megatron.legacy.fused_kernels"
_TRAINING = "megatron.training"
_RNG_WARNING = "CPU RNG state changed within GPU RNG context"
_MISSING = object()


class _StandIn(types.ModuleType):
    """A module that answers from `overrides` first and from `target` for everything else."""

    def __init__(self, target: Any, overrides: dict[str, Any]) -> None:
        super().__init__(target.__name__)
        self.__dict__.update(overrides)
        self.__dict__["_target"] = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_target"], name)


class _NoStream:
    """Stands for a CUDA stream or event: work on the CPU is done when the call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = _CPU

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        return None

    record = wait = synchronize = wait_event = wait_stream = _nothing

    def record_event(self, event: Any = None) -> Any:
        return event if event is not None else _NoStream()

    def query(self) -> bool:
        return True

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *exc: object) -> None:
        return None


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(new_state)


_RNG_FUNCTIONS = {
    "_get_cuda_rng_state": _get_rng_state,
    "_set_cuda_rng_state": _set_rng_state,
}


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _cpu_factory(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("pin_memory", None)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return on_cpu


def _softmax(
    input: torch.Tensor, dim: int, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any
) -> torch.Tensor:
    if dtype == torch.float32 and input.dtype == torch.float64:
        dtype = torch.float64
    return torch.softmax(input, dim, *args, dtype=dtype, **kwargs)


def _stand_in_for_torch() -> _StandIn:
    random = _StandIn(
        torch.cuda.random, {"get_rng_state": _get_rng_state, "set_rng_state": _set_rng_state}
    )
    nvtx = _StandIn(
        torch.cuda.nvtx,
        {"range_push": _nothing, "range_pop": _nothing, "range": contextlib.nullcontext},
    )
    cuda = _StandIn(
        torch.cuda,
        {
            "current_device": lambda: _CPU,
            "set_device": _nothing,
            "synchronize": _nothing,
            "empty_cache": _nothing,
            "Stream": _NoStream,
            "Event": _NoStream,
            "current_stream": _NoStream,
            "default_stream": _NoStream,
            "stream": contextlib.nullcontext,
            "set_stream": _nothing,
            "manual_seed": torch.manual_seed,
            "get_rng_state": _get_rng_state,
            "set_rng_state": _set_rng_state,
            "random": random,
            "nvtx": nvtx,
        },
    )
    overrides: dict[str, Any] = {name: _cpu_factory(getattr(torch, name)) for name in _FACTORIES}
    overrides["cuda"] = cuda
    overrides["distributed"] = _StandIn(
        torch.distributed,
        {
            "barrier": cpu_collectives.barrier,
            "all_to_all_single": cpu_collectives.all_to_all_single,
            "all_gather": cpu_collectives.all_gather,
            "reduce_scatter": cpu_collectives.reduce_scatter,
        },
    )
    overrides["softmax"] = _softmax
    return _StandIn(torch, overrides)


def _with_a_device(stand_in: _StandIn) -> _StandIn:
    """A stand-in for torch that also claims a device of the oldest kind that Megatron knows."""
    cuda = _StandIn(
        stand_in.cuda,
        {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "get_device_capability": lambda *args: (7, 0),
            "get_device_properties": lambda *args: types.SimpleNamespace(major=7, minor=0),
        },
    )
    return _StandIn(stand_in, {"cuda": cuda})


def _type_seen_by_megatron(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def tensor_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if args or kwargs or not caller.startswith("megatron."):
            return original(self, *args, **kwargs)
        return _CUDA_TYPE_NAMES.get(self.dtype) or original(self)

    return tensor_type


def _without_rng_warning(record: logging.LogRecord) -> bool:
    return _RNG_WARNING not in record.getMessage()


@dataclass(frozen=True)
class _Replacement:
    """One attribute that was set, and what was there."""

    owner: Any
    name: str
    original: Any  # _MISSING: the owner inherited it
    value: Any

    def is_in_place(self) -> bool:
        return vars(self.owner).get(self.name, _MISSING) is self.value

    def undo(self) -> None:
        if self.original is _MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.original)


class _Shim(importlib.abc.MetaPathFinder):
    """Everything `apply` changed; as an import hook it also reaches modules loaded later."""

    def __init__(self) -> None:
        self._torch = _stand_in_for_torch()
        self._torch_of_training = _with_a_device(self._torch)
        self._replacements: list[_Replacement] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        original = vars(owner).get(name, _MISSING)
        setattr(owner, name, value)
        self._replacements.append(_Replacement(owner, name, original, value))

    def enter_module(self, module: types.ModuleType) -> None:
        names = vars(module)
        name = names.get("__name__", "")
        if names.get("torch") is torch:
            in_training = name == _TRAINING or name.startswith(_TRAINING + ".")
            self.replace(module, "torch", self._torch_of_training if in_training else self._torch)
        if name == _FUSED_KERNELS:
            self.replace_in(module, "load", _nothing)
        elif name == _RNG_MODULE:
            for function, value in _RNG_FUNCTIONS.items():
                self.replace_in(module, function, value)
        elif name == _MOE_UTILS and "te_general_gemm" not in names:
            self.replace(module, "te_general_gemm", None)
        elif name == _DISPATCHERS:
            dispatcher = names.get("MoEAlltoAllTokenDispatcher", module)
            self.replace_in(dispatcher, "cuda_dtoh_stream", _NoStream())

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

        # Tensor inherits these three; an override on Tensor hides them.
        self.replace(torch.Tensor, "cuda", stay)
        self.replace(torch.Tensor, "record_stream", _nothing)
        self.replace(torch.Tensor, "type", _type_seen_by_megatron(torch.Tensor.type))
        self.replace(torch.nn.Module, "cuda", stay)

    def install(self) -> None:
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

    def remove(self) -> None:
        latest = {(id(r.owner), r.name): r for r in self._replacements}.values()
        foreign = [
            f"{getattr(r.owner, '__name__', r.owner)}.{r.name}"
            for r in latest
            if not r.is_in_place()
        ]
        if foreign:
            raise RuntimeError(
                f"{', '.join(foreign)} changed after the CPU shim was applied: undo that first"
            )
        logging.getLogger(_RNG_MODULE).removeFilter(_without_rng_warning)
        sys.meta_path.remove(self)
        while self._replacements:
            self._replacements.pop().undo()

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
    shim = _Shim()
    shim.install()
    _active = shim


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

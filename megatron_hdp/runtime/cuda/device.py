"""What is known before CUDA starts: this machine's GPUs by their driver, a run by its arguments."""

from __future__ import annotations

import argparse
import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass

Capability = tuple[int, int]
"""Of a GPU: (9, 0) is Hopper, (10, 0) Blackwell."""

EAGER = 1
"""What `loading_mode` gives where kernels are loaded at the start; 2: with their first launch."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is known of a run before CUDA starts."""

    capability: Capability | None
    """Of this machine's GPUs; None where there is none."""
    hybrid_data_parallel: bool
    tensor_parallel: bool = False
    """The run has tensor-parallel ranks."""
    registers_buffers: bool = False
    """Megatron registers buffers for gradients with NCCL (``--use-nccl-ub``)."""
    keeps_module_loading: bool = False
    """``CUDA_MODULE_LOADING`` stays as it is inherited (``--hdp-module-loading``)."""


def compute_capability() -> Capability | None:
    """The capability of this machine's first GPU, from its driver: CUDA is not started.

    None where no NVIDIA driver answers or every GPU is hidden from this process.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    if nvml.nvmlInit_v2():
        return None
    try:
        failed = nvml.nvmlDeviceGetHandleByIndex_v2(
            0, ctypes.byref(device)
        ) or nvml.nvmlDeviceGetCudaComputeCapability(
            device, ctypes.byref(major), ctypes.byref(minor)
        )
    finally:
        nvml.nvmlShutdown()
    return None if failed else (major.value, minor.value)


def loading_mode() -> int | None:
    """How CUDA loads kernels in this process; None: it has not started, or is older than 11.7."""
    try:
        mode, driver = ctypes.c_int(), ctypes.CDLL("libcuda.so.1")
        failed = driver.cuModuleGetLoadingMode(ctypes.byref(mode))
    except (OSError, AttributeError):
        return None
    return None if failed else mode.value


def pci_address(index: int) -> str:
    """The address of a GPU of this process by its number there, as ``/sys`` writes it.

    CUDA must have started.
    """
    driver, found = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    text = ctypes.create_string_buffer(32)
    error = driver.cuDeviceGet(ctypes.byref(found), index) or driver.cuDeviceGetPCIBusId(
        text, len(text), found
    )
    if error:
        raise RuntimeError(f"CUDA does not know the address of GPU {index}: error {error}")
    return text.value.decode().lower()


def run_of(arguments: Sequence[str]) -> Run:
    """The run that these arguments of Megatron-LM's script begin.

    Abbreviations are understood: what Megatron's parser takes for one of these flags is one.
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--hybrid-data-parallel", action="store_true")
    parser.add_argument("--tensor-model-parallel-size", default="1")
    parser.add_argument("--use-nccl-ub", action="store_true")
    parser.add_argument("--hdp-module-loading")
    found, _ = parser.parse_known_args(arguments)
    if not found.hybrid_data_parallel:
        return Run(capability=None, hybrid_data_parallel=False)  # off means off
    return Run(
        capability=compute_capability(),
        hybrid_data_parallel=True,
        tensor_parallel=found.tensor_model_parallel_size != "1",
        registers_buffers=found.use_nccl_ub,
        keeps_module_loading=found.hdp_module_loading == "inherit",
    )

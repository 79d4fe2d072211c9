"""What the driver says of this machine's GPUs without starting CUDA."""

from __future__ import annotations

import ctypes
import os

Capability = tuple[int, int]
"""Of a GPU: (9, 0) is Hopper, (10, 0) Blackwell."""

EAGER = 1
"""What `loading_mode` gives where kernels are loaded at the start; 2: with their first launch."""


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

"""Into how many hardware queues CUDA sorts a process's streams: decided before CUDA starts.

CUDA reads ``CUDA_DEVICE_MAX_CONNECTIONS`` (1 to 32, 8 unless set) once, when it starts. Streams
that share a queue run in the order of their launches, whatever they wait for.

- One queue is what Megatron demands with tensor parallelism before Blackwell: it launches a
  collective before the product that shall hide it, and relies on their starting in that order.
- Rings, gradient sync and copies to the host want queues of their own. In a shared one a copy that
  waits for its event holds up everything launched after it, computation too.
- Where both are wanted Megatron's demand wins. Results are the same either way.

This module imports no torch, so that it can run first.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import MutableMapping
from dataclasses import dataclass

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
_MOST = 32
_BLACKWELL = (10, 0)

Capability = tuple[int, int]
"""Of a GPU: (9, 0) is Hopper, (10, 0) Blackwell."""


@dataclass(frozen=True)
class Connections:
    """A number of queues and why."""

    number: int
    why: str


def wanted(
    capability: Capability | None, *, tensor_parallel: bool, hybrid_data_parallel: bool
) -> Connections | None:
    """What a run wants; None where CUDA's own number, or no GPU, will do.

    Args:
        capability: of this machine's GPUs; None where there is none.
        tensor_parallel: the run has tensor-parallel ranks.
        hybrid_data_parallel: it has rings.
    """
    if capability is None:
        return None
    if tensor_parallel and capability < _BLACKWELL:
        why = "tensor-parallel communication overlaps only when it starts in the order of launches"
        return Connections(1, why)
    if hybrid_data_parallel:
        why = "rings, gradient sync and copies to the host must not queue behind each other"
        return Connections(_MOST, why)
    return None


def prepare(
    capability: Capability | None,
    *,
    tensor_parallel: bool,
    hybrid_data_parallel: bool,
    environment: MutableMapping[str, str] = os.environ,
) -> str | None:
    """Sets the variable where it is not set; call it before anything touches CUDA.

    Args:
        capability: see `wanted`.
        tensor_parallel: likewise.
        hybrid_data_parallel: likewise.
        environment: of this process.

    Returns:
        One line of doubt if the variable is set to something else, which is kept; else None.

    Raises:
        ValueError: it is set to what CUDA does not take.
    """
    want = wanted(
        capability, tensor_parallel=tensor_parallel, hybrid_data_parallel=hybrid_data_parallel
    )
    if want is None:
        return None
    found = environment.get(VARIABLE)
    if found is None:
        environment[VARIABLE] = str(want.number)
        return None
    if not found.isdecimal() or not 1 <= int(found) <= _MOST:
        raise ValueError(
            f"{VARIABLE} is {found!r}, expected a number from 1 to {_MOST}: unset it, and "
            f"{want.number} is used"
        )
    is_one_queue = int(found) == 1
    if is_one_queue == (want.number == 1):
        return None
    return f"{VARIABLE}={found} is kept, {want.number} would be faster: {want.why}"


def describe(capability: Capability | None, found: str | None) -> str:
    """One line for people: what a run under HDP will do on this machine.

    Args:
        capability: see `wanted`.
        found: the variable's value, None where it is not set.
    """
    if capability is None:
        return "no matter without a GPU"
    plain = wanted(capability, tensor_parallel=False, hybrid_data_parallel=True)
    parallel = wanted(capability, tensor_parallel=True, hybrid_data_parallel=True)
    assert plain is not None and parallel is not None
    wants = f"{plain.number} with HDP"
    if parallel.number != plain.number:
        wants += f", {parallel.number} with tensor parallelism"
    if found is None:
        return f"not set: a run sets {wants}"
    return f"{found} is set and kept; a run would set {wants}"


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

"""A small trace as torch.profiler writes it, whose every overlap is known."""

from typing import Any


def event(name: str, category: str, start: float, length: float, **more: Any) -> dict[str, Any]:
    """A bar; times in microseconds."""
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length} | more


KERNEL, COPY = "kernel", "gpu_memcpy"
EVENTS = [
    {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
    {"ph": "i", "cat": "kernel", "name": "an instant", "ts": 0},
    event("aten::mm", "cpu_op", 0, 500),
    event("cudaLaunchKernel", "cuda_runtime", 0, 5),
    event("sm90_xmma_gemm_bf16", KERNEL, 1000, 4000),
    event("flash_fwd_kernel", KERNEL, 5000, 2000),
    event("Memset (Device)", "gpu_memset", 7000, 100),
    event("Memcpy DtoD (Device -> Device)", COPY, 7100, 900),
    event("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", KERNEL, 2000, 1000),
    event("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", KERNEL, 7500, 1500),
    event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", KERNEL, 9000, 2000),
    event("Memcpy DtoH (Device -> Pinned)", COPY, 3000, 1000),
    event("Memcpy HtoD (Pinned -> Device)", COPY, 8000, 500),
]

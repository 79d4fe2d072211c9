"""Copies to the host and back that run beside the compute: GPU streams, or threads on the CPU.

Each direction is a line of its own: copies in it run one after another, copies of the two at the
same time. A copy starts when the compute that was issued before it is done, and compute waits for a
copy where it says so; nobody else waits for anybody.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch


class Copy(Protocol):
    """A copy under way."""

    def wait(self) -> None:
        """What is computed after this call sees the copy done."""
        ...


class CopyEngine(Protocol):
    """Starts copies between tensors ``uint8 [n]``; both must stay as they are until it is done."""

    least_bytes: int
    """Smaller tensors are not worth a copy: starting it costs more than the memory is worth."""

    def to_host(self, host: torch.Tensor, device: torch.Tensor) -> Copy:
        """Copies `device` to `host` once the compute issued so far is done."""
        ...

    def to_device(self, device: torch.Tensor, host: torch.Tensor) -> Copy:
        """Copies `host` to `device` likewise."""
        ...


class _ThreadCopy:
    def __init__(self, future: Future[torch.Tensor]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()


class ThreadCopyEngine:
    """A thread for each direction. On the CPU compute is done when it returns."""

    least_bytes = 1

    def __init__(self) -> None:
        self._to_host = ThreadPoolExecutor(1, thread_name_prefix="copy-to-host")
        self._to_device = ThreadPoolExecutor(1, thread_name_prefix="copy-to-device")

    def to_host(self, host: torch.Tensor, device: torch.Tensor) -> Copy:
        """See `CopyEngine.to_host`."""
        return _ThreadCopy(self._to_host.submit(host.copy_, device))

    def to_device(self, device: torch.Tensor, host: torch.Tensor) -> Copy:
        """See `CopyEngine.to_device`."""
        return _ThreadCopy(self._to_device.submit(device.copy_, host))


class _StreamCopy:
    def __init__(self, done: torch.cuda.Event) -> None:
        self._done = done

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._done)


class StreamCopyEngine:
    """A CUDA stream for each direction, on the GPU's copy engines; host tensors are page-locked.

    Streams wait for each other by events only; the CPU never waits.
    """

    least_bytes = 1 << 20  # 20 us at 50 GB/s, about what launching it takes

    def __init__(self, device: torch.device) -> None:
        self._to_host = torch.cuda.Stream(device)
        self._to_device = torch.cuda.Stream(device)

    def to_host(self, host: torch.Tensor, device: torch.Tensor) -> Copy:
        """See `CopyEngine.to_host`."""
        return _copy(self._to_host, host, device)

    def to_device(self, device: torch.Tensor, host: torch.Tensor) -> Copy:
        """See `CopyEngine.to_device`."""
        return _copy(self._to_device, device, host)


def _copy(stream: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor) -> Copy:
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
        done = torch.cuda.Event()
        done.record(stream)
    return _StreamCopy(done)


def select_copy_engine(device: torch.device) -> CopyEngine:
    """The engine for activations on `device`."""
    return StreamCopyEngine(device) if device.type == "cuda" else ThreadCopyEngine()

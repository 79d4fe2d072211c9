"""Copies to the host and back that run beside the compute: GPU streams, or threads on the CPU.

Each direction is a line of its own: copies in it run one after another, copies of the two at the
same time. A copy starts when the compute that was issued before it is done, and compute waits for a
copy where it says so; nobody else waits for anybody.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import torch

from megatron_hdp.runtime.timeline import TO_DEVICE, TO_HOST, Timeline

Copy: TypeAlias = Callable[[], object]
"""Waits for a copy under way: what is computed after the call sees it done."""


class CopyEngine(ABC):
    """Starts copies between tensors ``uint8 [n]``; both must stay as they are until it is done.

    Args:
        timeline: where the copies are noted.
    """

    least_bytes: int
    """Smaller tensors are not worth a copy: starting it costs more than the memory is worth."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline

    def to_host(self, host: torch.Tensor, device: torch.Tensor) -> Copy:
        """Copies `device` to `host` once the compute issued so far is done."""
        return self._copy(TO_HOST, host, device)

    def to_device(self, device: torch.Tensor, host: torch.Tensor) -> Copy:
        """Copies `host` to `device` likewise."""
        return self._copy(TO_DEVICE, device, host)

    @abstractmethod
    def _copy(self, kind: str, target: torch.Tensor, source: torch.Tensor) -> Copy:
        """Issues the copy; what it returns waits for it."""


class ThreadCopyEngine(CopyEngine):
    """A thread for each direction. On the CPU compute is done when it returns."""

    least_bytes = 1

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(timeline)
        self._threads = {
            kind: ThreadPoolExecutor(1, thread_name_prefix=kind.replace(" ", "-"))
            for kind in (TO_HOST, TO_DEVICE)
        }

    def _copy(self, kind: str, target: torch.Tensor, source: torch.Tensor) -> Copy:
        micro_batch = self._timeline.micro_batch

        def copy() -> torch.Tensor:
            with self._timeline.beside(kind, micro_batch):
                return target.copy_(source)

        return self._threads[kind].submit(copy).result


class StreamCopyEngine(CopyEngine):
    """A CUDA stream for each direction, on the GPU's copy engines; host tensors are pinned.

    Streams wait for each other by events only; the CPU never waits.
    """

    least_bytes = 1 << 20  # 20 us at 50 GB/s, about what launching it takes

    def __init__(self, device: torch.device, timeline: Timeline) -> None:
        super().__init__(timeline)
        self._streams = {kind: torch.cuda.Stream(device) for kind in (TO_HOST, TO_DEVICE)}

    def _copy(self, kind: str, target: torch.Tensor, source: torch.Tensor) -> Copy:
        stream, done = self._streams[kind], torch.cuda.Event()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            with self._timeline.beside(kind, self._timeline.micro_batch):
                target.copy_(source, non_blocking=True)
            done.record(stream)
        wait: Copy = done.wait  # makes the stream that is current then wait
        return wait


def select_copy_engine(device: torch.device, timeline: Timeline) -> CopyEngine:
    """The engine for activations on `device`."""
    if device.type == "cuda":
        return StreamCopyEngine(device, timeline)
    return ThreadCopyEngine(timeline)

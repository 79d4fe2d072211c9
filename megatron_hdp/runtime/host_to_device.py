"""What the host makes for a micro-batch reaches a GPU in one copy, before it is wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

Item = TypeVar("Item")
Arrays = Mapping[str, npt.NDArray[np.generic]]
_ALIGNMENT = 8  # bytes; of the widest type


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on the device; the host does not wait for a GPU."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def numbers_to_device(
    values: Sequence[float], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Numbers of the host on the device; like `to_device`, unlike `torch.tensor`, no wait."""
    return to_device(torch.tensor(values, dtype=dtype), device)


class PackedArrays:
    """Arrays one behind another in one buffer of the host, each where its type may begin.

    Args:
        arrays: by name; types of at most 8 bytes.
        pin: whether the buffer is pinned. PyTorch keeps such buffers and gives one away again
            when the copies out of it are done.
    """

    def __init__(self, arrays: Arrays, pin: bool = False) -> None:
        self._parts: dict[str, tuple[int, torch.Tensor]] = {}
        end = 0
        for name, array in arrays.items():
            part = torch.from_numpy(array)
            self._parts[name] = (end, part)
            end += -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.buffer = torch.empty(end, dtype=torch.uint8, pin_memory=pin)
        views = self.views(self.buffer)
        for name, (_, part) in self._parts.items():
            views[name].copy_(part)

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """The arrays as tensors in a copy of the buffer."""
        return {
            name: buffer[begin : begin + part.nbytes].view(part.dtype).view(part.shape)
            for name, (begin, part) in self._parts.items()
        }


def with_arrays_ahead(
    items: Sequence[Item],
    arrays_of: Callable[[Item], Arrays],
    device: torch.device,
    stream: torch.cuda.Stream | None,
) -> Iterator[tuple[Item, dict[str, torch.Tensor]]]:
    """Yields items with their arrays on a device; those of the next are copied meanwhile.

    On a GPU an item's arrays travel in one copy on a stream of their own, begun before the item
    before it is yielded, so that nobody waits for it. On the CPU they stay where they are.

    Args:
        items: in order.
        arrays_of: what of an item goes to the device.
        device: a CPU or a GPU.
        stream: for the copies to a GPU; None for a CPU.
    """
    if not items:
        return
    following = _begin(arrays_of(items[0]), device, stream)
    for i, item in enumerate(items):
        arrived = following
        if i + 1 < len(items):
            following = _begin(arrays_of(items[i + 1]), device, stream)
        yield item, arrived()


def _begin(
    arrays: Arrays, device: torch.device, stream: torch.cuda.Stream | None
) -> Callable[[], dict[str, torch.Tensor]]:
    """Begins a copy; returns what makes the current stream wait for it and gives the tensors."""
    if stream is None:
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return lambda: tensors
    packed = PackedArrays(arrays, pin=True)
    copied = torch.cuda.Event()
    with torch.cuda.stream(stream):
        buffer = packed.buffer.to(device, non_blocking=True)
        copied.record(stream)

    def arrived() -> dict[str, torch.Tensor]:
        current = torch.cuda.current_stream(device)
        current.wait_event(copied)
        buffer.record_stream(current)  # it was allocated on the other one
        return packed.views(buffer)

    return arrived

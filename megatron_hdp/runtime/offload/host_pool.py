"""Host memory that offloaded activations use again and again: large slabs, handed out in pieces.

Pinned memory is asked for before a step (`HostPool.reserve`), since asking waits for the whole
device, and never given back to the system. Pieces are cut from slabs, the first place that is wide
enough, and neighbours join when they come back: what is held stops growing once the fullest moment
has been seen.
"""

from __future__ import annotations

import warnings
from collections import deque

import torch

_ALIGNMENT = 512  # bytes; what copy engines like
_WIDTH = 4  # of a slab that is asked for ahead, in largest pieces: its end may be lost


class HostBuffer:
    """A piece of host memory; give it back to its pool when nothing reads or writes it any more."""

    def __init__(self, slab: _Slab, start: int, num_bytes: int) -> None:
        self.slab = slab
        self.start = start
        self.num_bytes = num_bytes
        self.tensor = slab.memory[start : start + num_bytes]
        """uint8 ``[num_bytes]``."""


class HostPool:
    """Hands out host memory.

    `take` belongs to one thread. `give_back` may be called by any, also while `take` runs (a tensor
    may die in the middle of it): pieces wait in a queue until the next `take`.

    Args:
        slab_bytes: least size of what is asked of the system; a power of two, because PyTorch
            rounds pinned memory up to one.
        pin: pinned memory, which a GPU's copy engines can reach by themselves.

    Attributes:
        num_late: slabs that `take` had to ask for although memory had been reserved.
    """

    def __init__(self, slab_bytes: int = 1 << 30, pin: bool = False) -> None:
        if slab_bytes < _ALIGNMENT or slab_bytes & (slab_bytes - 1):
            raise ValueError(
                f"slab_bytes is {slab_bytes:,}; expected a power of two of at least {_ALIGNMENT}"
            )
        self._slab_bytes = slab_bytes
        self._pin = pin
        self._slabs: list[_Slab] = []
        self._returned: deque[HostBuffer] = deque()
        self._taken_bytes = 0
        self._is_reserved = False
        self.num_late = 0

    @property
    def held_bytes(self) -> int:
        """What the pool has asked of the system; never falls."""
        return sum(len(slab.memory) for slab in self._slabs)

    @property
    def used_bytes(self) -> int:
        """What is handed out now, rounded up to whole pieces."""
        self._join_returned()
        return self._taken_bytes

    def reserve(self, num_bytes: int, largest_bytes: int) -> None:
        """Makes sure that so much can be taken besides what is, one piece after the other.

        Args:
            num_bytes: of all pieces together.
            largest_bytes: of the largest piece; less than that may be lost at a slab's end.
        """
        if num_bytes <= 0:
            return
        self._is_reserved = True
        piece = _rounded(largest_bytes)
        wanted = num_bytes + self.used_bytes
        usable = sum(max(0, len(slab.memory) - piece) for slab in self._slabs)
        while usable < wanted:
            last = _power_of_two(wanted - usable + piece)
            size = max(self._slab_bytes, min(last, _power_of_two(_WIDTH * piece)))
            self._add_slab(size)
            usable += size - piece

    def take(self, num_bytes: int) -> HostBuffer:
        """A piece of at least one byte; where none is left, the system is asked for more."""
        self._join_returned()
        wanted = _rounded(num_bytes)
        for slab in self._slabs:
            start = slab.cut(wanted)
            if start is not None:
                break
        else:
            self._note_late(wanted)
            slab = self._add_slab(max(self._slab_bytes, _power_of_two(wanted)))
            start = slab.cut(wanted)
            assert start is not None, "a new slab is wide enough"
        self._taken_bytes += wanted
        return HostBuffer(slab, start, num_bytes)

    def give_back(self, buffer: HostBuffer) -> None:
        """Makes the piece free for the next `take`."""
        self._returned.append(buffer)

    def _add_slab(self, size: int) -> _Slab:
        slab = _Slab(torch.empty(size, dtype=torch.uint8, pin_memory=self._pin))
        self._slabs.append(slab)
        return slab

    def _note_late(self, wanted: int) -> None:
        if not self._is_reserved:
            return
        self.num_late += 1
        if self.num_late == 1:
            warnings.warn(
                f"offloaded activations want {wanted:,} bytes of the host beyond the "
                f"{self.held_bytes:,} that were reserved for them: asked for in the middle of a "
                "step, which may wait for the device; later steps reserve more",
                stacklevel=3,
            )

    def _join_returned(self) -> None:
        while self._returned:
            buffer = self._returned.popleft()
            size = _rounded(buffer.num_bytes)
            buffer.slab.join(buffer.start, size)
            self._taken_bytes -= size


class _Slab:
    """One block of memory and its free stretches ``[start, end]``: sorted, none touching."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._free = [[0, len(memory)]]

    def cut(self, size: int) -> int | None:
        """Where a stretch of that size begins that is now taken; None if none is wide enough."""
        for i, (start, end) in enumerate(self._free):
            if end - start >= size:
                if end - start == size:
                    del self._free[i]
                else:
                    self._free[i][0] += size
                return start
        return None

    def join(self, start: int, size: int) -> None:
        """Frees a stretch and joins it with its free neighbours."""
        end = start + size
        at = next((i for i, free in enumerate(self._free) if free[0] >= end), len(self._free))
        if at < len(self._free) and self._free[at][0] == end:
            end = self._free.pop(at)[1]
        if at > 0 and self._free[at - 1][1] == start:
            self._free[at - 1][1] = end
        else:
            self._free.insert(at, [start, end])


def _rounded(num_bytes: int) -> int:
    return -(-max(num_bytes, 1) // _ALIGNMENT) * _ALIGNMENT


def _power_of_two(num_bytes: int) -> int:
    return 1 << (num_bytes - 1).bit_length()

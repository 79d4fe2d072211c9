"""Keys and values of a stream's parts that wait in host memory, with the sums of their gradients.

They come to the device a layer and part at a time, the next part's on their way while those of one
are used: however many layers and parts there are, the device holds those of one layer and two. Of
parts for which it has room they stay there.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from megatron_hdp.runtime.offload import ActivationOffload, Copy
from megatron_hdp.runtime.ring.parts import EarlierKeys, Group, PartLayout, Stretch, SumType
from megatron_hdp.runtime.ring.travelling import wide_type

_UNDER_WAY = 4
"""Tensors whose way to the host compute does not wait for yet; they stay on the device so long."""


@dataclass
class HostRoom:
    """Where what a stream keeps waits, of all layers: the device holds what leaves of one or two.

    Args:
        offload: whose memory and copies are used.
    """

    offload: ActivationOffload
    stays: bool = False
    """Whether what the part keeps that runs now stays on the device."""
    leaving: deque[weakref.ref[HostTensor]] = field(default_factory=deque)
    """What is on its way to the host."""

    def sent(self, tensor: torch.Tensor) -> HostTensor:
        """A tensor on its way to the host."""
        sent = HostTensor(tensor, self.offload)
        self.offload.offloaded_bytes += tensor.nbytes
        self.leaving.append(weakref.ref(sent))
        while len(self.leaving) > _UNDER_WAY:
            one = self.leaving.popleft()()
            if one is not None:
                one.let_go()
        return sent


@dataclass
class _DeviceTensor:
    """A tensor that stays, in the place of a `HostTensor`."""

    tensor: torch.Tensor

    def fetch(self) -> None:
        """It is here."""

    def take(self) -> torch.Tensor:
        """The tensor itself."""
        return self.tensor


class HostTensor:
    """A tensor whose values wait in host memory.

    Args:
        tensor: on the device; nobody changes it any more.
        offload: whose memory and copies it uses.
    """

    def __init__(self, tensor: torch.Tensor, offload: ActivationOffload) -> None:
        self._offload, self._shape, self._dtype = offload, tensor.shape, tensor.dtype
        self._device = tensor.device
        self._source: torch.Tensor | None = tensor.contiguous()
        source = self._source.flatten().view(torch.uint8)
        self._on_host = offload.pool.take(len(source))
        self._leaving: Copy | None = offload.copies.to_host(self._on_host.tensor, source)
        self._arriving: tuple[torch.Tensor, Copy] | None = None

    def let_go(self) -> None:
        """Forgets the device's copy; compute waits until the host has it."""
        if self._leaving is not None:
            self._leaving()
            self._leaving = self._source = None

    def fetch(self) -> None:
        """Starts the way back, unless it has begun."""
        if self._arriving is None:
            self.let_go()
            found = torch.empty(self._shape, dtype=self._dtype, device=self._device)
            memory = found.flatten().view(torch.uint8)
            self._arriving = found, self._offload.copies.to_device(memory, self._on_host.tensor)

    def take(self) -> torch.Tensor:
        """The values on the device; compute waits until they are there."""
        self.fetch()
        assert self._arriving is not None, "it is on its way"
        (found, arrive), self._arriving = self._arriving, None
        arrive()
        return found

    def __del__(self) -> None:
        # the next user of the host memory is ordered after what compute has waited for
        if getattr(self, "_leaving", None) is not None:
            self.let_go()
        if getattr(self, "_arriving", None) is not None:
            self.take()
        if hasattr(self, "_on_host"):
            self._offload.pool.give_back(self._on_host)


@dataclass
class _Piece:
    """What one part keeps."""

    stretch: Stretch
    stays: bool
    keys: list[HostTensor] | list[_DeviceTensor]
    types: list[torch.dtype]
    """Of the sums."""
    sums: list[HostTensor] | list[_DeviceTensor] = field(default_factory=list)

    def fetch(self) -> None:
        """Starts the way of its keys and values to the device."""
        for one in self.keys:
            one.fetch()


class HostKeys(EarlierKeys):
    """`EarlierKeys` in host memory: a group a part.

    Args:
        room: one for all layers.
        sum_type: of the gradients.
    """

    in_groups = True

    def __init__(self, room: HostRoom, sum_type: SumType = wide_type) -> None:
        super().__init__(sum_type)
        self._room = room
        self._pieces: dict[tuple[str | int, ...], dict[int, _Piece]] = {}
        self._found_for: dict[tuple[str | int, ...], int] = {}

    def put(self, stretch: Stretch, *keys: torch.Tensor) -> None:
        """Keeps a copy of a stretch; it stays as it is where it is computed again."""
        pieces = self._pieces.setdefault(stretch.key, {})
        if stretch.first not in pieces:
            stays, types = self._room.stays, [self._sum_type(one) for one in keys]
            kept = [one.detach().clone() if stays else one.detach() for one in keys]
            pieces[stretch.first] = _Piece(stretch, stays, self._put_away(kept, stays), types)

    def groups(self, layout: PartLayout, kind: str) -> Iterator[Group]:
        """What earlier parts hold here of what continues, part by part."""
        stretch = layout.earlier.get(kind)
        if stretch is None:
            return
        pieces = [
            piece
            for first, piece in sorted(self._pieces[stretch.key].items())
            if first < stretch.stop
        ]
        for piece, behind in zip(pieces, [*pieces[1:], None], strict=True):
            piece.fetch()
            if behind is not None:
                behind.fetch()
            yield Group(piece.stretch, tuple(one.take() for one in piece.keys))

    def of(self, stretch: Stretch) -> tuple[torch.Tensor, ...]:
        """What one part keeps, as it was put."""
        return tuple(one.take() for one in self._pieces[stretch.key][stretch.first].keys)

    def add(self, stretch: Stretch, *gradients: torch.Tensor) -> None:
        """Adds to the gradients of a group."""
        pieces = self._pieces[stretch.key]
        piece = pieces[stretch.first]
        if piece.sums:
            totals = [one.take() for one in piece.sums]
            for total, gradient in zip(totals, gradients, strict=True):
                total += gradient
        else:
            totals = [
                one.to(kind, copy=True) for one, kind in zip(gradients, piece.types, strict=True)
            ]
        piece.sums = self._put_away(totals, piece.stays)
        self._found_for[stretch.key] = stretch.stop
        behind = pieces.get(stretch.stop)  # whose sums are wanted next, by `add` or by `take`
        for one in behind.sums if behind is not None else ():
            one.fetch()

    def take(self, stretch: Stretch) -> tuple[torch.Tensor, ...]:
        """What later parts have found for a stretch, which nobody needs again.

        Raises:
            RuntimeError: the part behind has not run backward just before.
        """
        self.require_order(self._found_for.get(stretch.key, -1), stretch)
        return tuple(one.take() for one in self._pieces[stretch.key].pop(stretch.first).sums)

    def _put_away(
        self, tensors: list[torch.Tensor], stays: bool
    ) -> list[HostTensor] | list[_DeviceTensor]:
        if stays:
            return [_DeviceTensor(one) for one in tensors]
        return [self._room.sent(one) for one in tensors]

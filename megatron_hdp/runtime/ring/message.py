"""What goes around a ring as one message, and what is found for it on the way."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch

from megatron_hdp.runtime.ring.comm import RingComm

Tensors: TypeAlias = Sequence[torch.Tensor]
Passing: TypeAlias = Iterator[tuple[int, list[torch.Tensor]]]
"""How many places before us the member is whose tensors these are, and the tensors; 0: our own."""

Adding: TypeAlias = Callable[[list[torch.Tensor]], None]
"""Adds what was found here to what others have found."""
Finding: TypeAlias = Callable[[int, list[torch.Tensor]], Adding]
"""What is found for the tensors that are here, of a member so many places before us."""


class Found(NamedTuple):
    """What members find for what passes them."""

    fields: Sequence[Field]
    """Of one type."""
    begin: Sequence[float]
    """Of each field, what the first one adds to."""
    join: Callable[[Tensors, Tensors], None]
    """Adds what some members have found, the second, to what others have."""


class Field(NamedTuple):
    """A tensor of a message."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Its bytes."""
        return int(math.prod(self.shape) * self.dtype.itemsize)


def buffers(
    comm: RingComm, fields: Sequence[Field], like: torch.Tensor, *names: str
) -> list[torch.Tensor]:
    """Memory of the communicator for messages of these fields, one of each name."""
    size = sum(field.num_bytes for field in fields)
    return [comm.buffer(name, size, like, torch.uint8) for name in names]


def apart(message: torch.Tensor, fields: Sequence[Field]) -> list[torch.Tensor]:
    """Views of what a message holds."""
    pieces = message.split([field.num_bytes for field in fields])
    return [
        piece.view(field.dtype).view(field.shape)
        for piece, field in zip(pieces, fields, strict=True)
    ]


def put(message: torch.Tensor, fields: Sequence[Field], tensors: Tensors) -> None:
    """Copies tensors into a message."""
    for room, tensor in zip(apart(message, fields), tensors, strict=True):
        room.copy_(tensor)


def fill(message: torch.Tensor, found: Found) -> None:
    """Makes a message what the first of `found` adds to."""
    for total, value in zip(apart(message, found.fields), found.begin, strict=True):
        total.fill_(value)

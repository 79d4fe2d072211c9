"""A shard of state at one version, as named pieces, and the two versions that are kept of it.

A piece says of which parameter it is and where in it, never where it lay in a buffer: the layout of
buffers depends on the number of ranks, and the next reader may have another one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch

Allocate = Callable[[tuple[int, int], torch.dtype], torch.Tensor]


class Piece(NamedTuple):
    """A range of a parameter, flat, and where it begins in each row of a snapshot."""

    name: str
    start: int
    stop: int
    at: int

    @property
    def count(self) -> int:
        """Entries."""
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """What a shard consists of; the same for all its versions."""

    rows: tuple[str, ...]
    """Kinds of state, each with all pieces one after another."""
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        """Entries of a row."""
        return sum(piece.count for piece in self.pieces)

    @property
    def num_bytes(self) -> int:
        """Of one version."""
        return len(self.rows) * self.numel * self.dtype.itemsize

    def to_json(self) -> dict[str, Any]:
        """For a message."""
        kind = str(self.dtype).removeprefix("torch.")
        return {"rows": self.rows, "dtype": kind, "pieces": [tuple(one) for one in self.pieces]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """The other way round."""
        pieces = tuple(Piece(*one) for one in data["pieces"])
        return cls(tuple(data["rows"]), getattr(torch, data["dtype"]), pieces)


@dataclass
class Snapshot:
    """One version of a shard in host memory."""

    version: int
    values: torch.Tensor
    """``[rows, entries]``."""
    facts: dict[str, Any]
    """What belongs to it besides, such as the number of the optimizer's steps."""
    is_whole: bool = False


class Shelf:
    """At most two versions of one shard.

    Args:
        owner: whose shard it is.
        members: among whom the state is spread; the shard is one of as many.
        layout: of the shard.
        allocate: makes the memory of a version.
    """

    def __init__(
        self, owner: int, members: Sequence[int], layout: Layout, allocate: Allocate
    ) -> None:
        self.owner = owner
        self.members = tuple(members)
        self.layout = layout
        self._allocate = allocate
        self._lock = threading.Lock()
        self._snapshots: list[Snapshot] = []

    def begin(self, version: int, keep: int, facts: dict[str, Any]) -> Snapshot:
        """A snapshot to fill, in the memory of one that goes; only version `keep` stays."""
        with self._lock:
            going = [one for one in self._snapshots if one.version != keep]
            self._snapshots = [one for one in self._snapshots if one.version == keep]
            if going:
                values = going[0].values
            else:
                layout = self.layout
                values = self._allocate((len(layout.rows), layout.numel), layout.dtype)
            snapshot = Snapshot(version, values, facts)
            self._snapshots.append(snapshot)
            return snapshot

    def whole(self, version: int) -> Snapshot | None:
        """This version, if all of it is here."""
        with self._lock:
            found = (one for one in self._snapshots if one.version == version and one.is_whole)
            return next(found, None)

    def versions(self) -> list[int]:
        """Those that are here whole."""
        with self._lock:
            return [one.version for one in self._snapshots if one.is_whole]

    def leave_only(self, version: int) -> None:
        """Frees what is of other versions."""
        with self._lock:
            self._snapshots = [one for one in self._snapshots if one.version == version]


def in_host_memory(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Memory that no device copies to."""
    return torch.empty(shape, dtype=dtype)


def in_pinned_memory(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Memory that a GPU copies to beside its compute."""
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def bytes_of(values: torch.Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, not copied."""
    return memoryview(values.view(torch.uint8).view(-1).numpy())

"""A shard of state at one version, as named pieces, and the two versions that are kept of it.

A piece says of which parameter it is and where in it, never where it lay in a buffer: the layout of
buffers depends on the number of ranks, and the next reader may have another one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch


class Piece(NamedTuple):
    """A range of a parameter, flat, and where it begins in each row of a snapshot."""

    name: str
    start: int
    stop: int
    at: int

    @property
    def size(self) -> int:
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
        return sum(piece.size for piece in self.pieces)

    @property
    def num_bytes(self) -> int:
        """Of one version."""
        per_entry: int = self.dtype.itemsize
        return len(self.rows) * self.numel * per_entry

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
        pin: whether the memory is for a GPU's copies.
    """

    def __init__(
        self, owner: int, members: Sequence[int], layout: Layout, pin: bool = False
    ) -> None:
        self.owner = owner
        self.members = tuple(members)
        self.layout = layout
        self._pin = pin
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
                shape = len(layout.rows), layout.numel
                values = torch.empty(shape, dtype=layout.dtype, pin_memory=self._pin)
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


def bytes_of(values: torch.Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, not copied."""
    return memoryview(values.view(torch.uint8).view(-1).numpy())

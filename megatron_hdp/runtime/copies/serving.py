"""What a process does with connections: it keeps a neighbour's versions, and gives pieces away."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from megatron_hdp.runtime.copies.snapshots import (
    Layout,
    Piece,
    Shelf,
    Snapshot,
    bytes_of,
)
from megatron_hdp.runtime.copies.wire import (
    Address,
    connect,
    receive,
    receive_into,
    send,
    send_bytes,
)

Serve = Callable[[socket.socket, Callable[[], bool]], None]


class Source(NamedTuple):
    """Where a version of a shard is."""

    address: Address
    version: int
    members: tuple[int, ...]
    owner: int


def keeping(shelves: list[Shelf], members: Sequence[int]) -> Serve:
    """Serves a connection on which a neighbour sends its versions, which are put on a shelf.

    A version is whole when its last byte is here; only then is the sender told. A sender that was
    cut off connects anew and waits for what the first connection may still write.
    """
    one_at_a_time = threading.Lock()

    def serve(connection: socket.socket, go_on: Callable[[], bool]) -> None:
        if not one_at_a_time.acquire(timeout=connection.gettimeout() or 0.0):
            raise OSError("an older connection of the neighbour is still open")
        try:
            keep(connection, go_on)
        finally:
            one_at_a_time.release()

    def keep(connection: socket.socket, go_on: Callable[[], bool]) -> None:
        first = receive(connection)
        owner, layout = int(first["owner"]), Layout.from_json(first["layout"])
        shelf = next((one for one in shelves if one.owner == owner), None)
        if shelf is None or shelf.layout != layout:
            shelves[:] = [one for one in shelves if one.owner != owner]
            shelf = Shelf(owner, members, layout)
            shelves.append(shelf)
        while True:
            header = receive(connection, go_on)
            snapshot = shelf.begin(header["version"], header["keep"], header["facts"])
            receive_into(connection, bytes_of(snapshot.values))
            snapshot.is_whole = True
            send(connection, {"kept": snapshot.version})

    return serve


def serving(shelves: Sequence[Shelf]) -> Serve:
    """Serves a connection on which others ask for pieces of what is on the shelves."""

    def serve(connection: socket.socket, go_on: Callable[[], bool]) -> None:
        while True:
            asked = receive(connection, go_on)
            snapshot = held(shelves, asked["owner"], tuple(asked["members"]), asked["version"])
            if snapshot is None:
                raise OSError("asked for a version that is not here")
            send(connection, {"version": snapshot.version})
            for row in snapshot.values:
                for at, count in asked["parts"]:
                    send_bytes(connection, bytes_of(row[at : at + count]))

    return serve


def held(
    shelves: Sequence[Shelf], owner: int, members: tuple[int, ...], version: int
) -> Snapshot | None:
    """A version of an owner's shard, if it is on one of the shelves and whole."""
    found = (one.whole(version) for one in shelves if (one.owner, one.members) == (owner, members))
    return next((one for one in found if one is not None), None)


def fetch(
    source: Source, layout: Layout, pieces: Iterable[Piece], timeout_s: float
) -> dict[Piece, torch.Tensor]:
    """Pieces, or parts of pieces, of a version: ``[rows, count]`` each.

    Args:
        source: who holds it.
        layout: the shard's.
        pieces: with the places in the shard's rows.
        timeout_s: the longest silence.

    Raises:
        OSError: the source is gone or silent.
    """
    wanted = list(pieces)
    values = torch.empty((len(layout.rows), sum(one.size for one in wanted)), dtype=layout.dtype)
    with connect(source.address, "fetch", timeout_s) as connection:
        request = {
            "version": source.version,
            "members": source.members,
            "owner": source.owner,
            "parts": [(one.at, one.size) for one in wanted],
        }
        send(connection, request)
        receive(connection)
        receive_into(connection, bytes_of(values))
    ends = values.split([one.size for one in wanted], dim=1)
    return dict(zip(wanted, ends, strict=True))

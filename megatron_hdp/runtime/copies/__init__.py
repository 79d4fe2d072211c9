"""Versioned copies of what only one rank holds, in host memory at a neighbour on another host."""

from megatron_hdp.runtime.copies.placement import (
    Chosen,
    choose_common,
    choose_version,
    exposed,
    neighbours,
)
from megatron_hdp.runtime.copies.sending import Sender
from megatron_hdp.runtime.copies.serving import Source, fetch, keeping, serving
from megatron_hdp.runtime.copies.snapshots import Layout, Piece, Shelf, Snapshot
from megatron_hdp.runtime.copies.wire import Address, Listener, own_address

__all__ = [
    "Address",
    "Chosen",
    "Layout",
    "Listener",
    "Piece",
    "Sender",
    "Shelf",
    "Snapshot",
    "Source",
    "choose_common",
    "choose_version",
    "exposed",
    "fetch",
    "keeping",
    "neighbours",
    "own_address",
    "serving",
]

"""How a rank gets its steps on its node: questions over a socket, arrays in shared memory."""

from megatron_hdp.data_plane.wire.client import NodeClient
from megatron_hdp.data_plane.wire.layout import pack, unpack
from megatron_hdp.data_plane.wire.protocol import MAX_MESSAGE_BYTES, DataPlaneLost, Message, Peer
from megatron_hdp.data_plane.wire.segments import SegmentFolder
from megatron_hdp.data_plane.wire.server import ClientRecord, NodeServer

__all__ = [
    "MAX_MESSAGE_BYTES",
    "ClientRecord",
    "DataPlaneLost",
    "Message",
    "NodeClient",
    "NodeServer",
    "Peer",
    "SegmentFolder",
    "pack",
    "unpack",
]

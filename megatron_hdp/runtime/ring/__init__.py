"""Rings: who holds which slice of a micro-batch, how slices travel, what is computed meanwhile.

Design: `docs/design/rings.md`.
"""

from megatron_hdp.runtime.ring.attention import RingAttention
from megatron_hdp.runtime.ring.comm import RingComm, Transfer
from megatron_hdp.runtime.ring.communicator import (
    connect_counterparts,
    neighbour_rounds,
    new_ring_group,
    running_nccl,
)
from megatron_hdp.runtime.ring.group import RingGroup, RingGroups
from megatron_hdp.runtime.ring.host_keys import HostKeys, HostRoom
from megatron_hdp.runtime.ring.latent import LatentRing
from megatron_hdp.runtime.ring.layout import TokenLayout
from megatron_hdp.runtime.ring.parts import EarlierKeys, PartLayout, SumType, part_layouts
from megatron_hdp.runtime.ring.travelling import wide_type

__all__ = [
    "EarlierKeys",
    "HostKeys",
    "HostRoom",
    "LatentRing",
    "PartLayout",
    "RingAttention",
    "RingComm",
    "RingGroup",
    "RingGroups",
    "SumType",
    "TokenLayout",
    "Transfer",
    "connect_counterparts",
    "neighbour_rounds",
    "new_ring_group",
    "part_layouts",
    "running_nccl",
    "wide_type",
]

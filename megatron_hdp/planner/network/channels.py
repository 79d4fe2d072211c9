"""NCCL's channels that two neighbours of a ring share, and the bandwidth that these leave them.

NCCL takes a communicator for one whose ranks all talk to all others at a time, and on many nodes it
gives a pair fewer channels the more ranks there are. So what was measured on one node, or is
assumed of a whole link, may be more than a ring of a larger job has.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Self

from megatron_hdp.planner.cost_model import CostModel

Version = tuple[int, int, int]

MOST_PEERS, CHANNELS = 8, 4
VARIABLES = ("NCCL_MAX_P2P_PEERS", "NCCL_NCHANNELS_PER_NET_PEER")
"""Of the user, which decide instead of `FIELDS`."""
_INTRA, _INTER = 20e9, 14e9  # bytes a second of a channel over NVLink, over the network
_SAYS_WHERE = (2, 13, 0)  # torch, where NCCL's configuration lies
_SIZES = tuple(2**power for power in range(3, 15))


@dataclass(frozen=True)
class Field:
    """Of NCCL's configuration of a communicator."""

    name: str
    since: Version
    offset: int
    value: int


FIELDS = (  # the first that the library knows is used
    Field("maxP2pPeers", (2, 30, 0), 88, MOST_PEERS),
    Field("nChannelsPerNetPeer", (2, 28, 0), 72, CHANNELS),
)


@dataclass(frozen=True)
class Nccl:
    """What runs the rings."""

    version: Version
    is_widened: bool
    """Whether their communicator asks for more channels (`runtime.ring.nccl_channels`)."""
    max_ctas: int
    """Blocks of the GPU that its messages may take; 0: its own default."""

    @classmethod
    def installed(cls, max_ctas: int, environment: Mapping[str, str] = os.environ) -> Self | None:
        """The one that pip has installed with torch, for commands that import neither.

        None where there is none, and where a variable of the user's decides how many it gives.
        """
        packages = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
        version = next(filter(None, map(_version_of, packages)), None)
        if version is None or any(name in environment for name in VARIABLES):
            return None
        is_known = version >= FIELDS[-1].since and (_version_of("torch") or version) >= _SAYS_WHERE
        return cls(version, is_known, max_ctas)

    def channels(self, num_ranks: int, ranks_per_node: int) -> int:
        """Those of a pair of so many HDP ranks; see `channels_of_a_pair`."""
        return channels_of_a_pair(
            self.version,
            num_ranks,
            ranks_per_node,
            max_ctas=self.max_ctas,
            is_widened=self.is_widened,
        )

    def __str__(self) -> str:
        """``NCCL 2.28.9``."""
        return f"NCCL {'.'.join(map(str, self.version))}"

    def by_size(self, ranks_per_node: int = 8) -> str:
        """Channels a pair by the job's size, in words: ``16 on 8 ranks, 4 from 16 on``."""
        runs: list[tuple[int, int]] = []
        for size in _SIZES:
            found = self.channels(size, ranks_per_node)
            if not runs or runs[-1][0] != found:
                runs.append((found, size))
        words = [f"{found} from {size:,} on" for found, size in runs[1:]]
        return ", ".join([f"{runs[0][0]} on {runs[0][1]} ranks", *words])


def _version_of(package: str) -> Version | None:
    try:
        numbers = re.findall(r"\d+", metadata.version(package).split("+")[0])
    except metadata.PackageNotFoundError:
        return None
    major, minor, patch = (*map(int, numbers[:3]), 0, 0, 0)[:3]
    return major, minor, patch


def following(
    cost_model: CostModel, nccl: Nccl | None, num_ranks: int, tensor_ranks: int = 1
) -> CostModel:
    """The cost model with the bandwidths that a job's channels leave, never more than it has.

    The same on all ranks that run one NCCL. Of fewer channels than it was measured with, each
    carries as much as then, or what NCCL itself assumes if that is more; if nobody knows with how
    many, it has the bandwidths of whole links.

    Args:
        cost_model: of an HDP rank.
        nccl: None where it sends nothing, or nobody knows how.
        num_ranks: HDP ranks of the job.
        tensor_ranks: GPUs of an HDP rank, which send side by side.
    """
    if nccl is None or num_ranks == 1:
        return cost_model
    before, now = cost_model.channels, nccl.channels(num_ranks, cost_model.ranks_per_node)
    if before and now >= before:
        return cost_model

    def left(bytes_per_s: float, of_channel: float) -> float:
        measured = bytes_per_s / before if before else 0.0
        return min(bytes_per_s, now * max(of_channel * tensor_ranks, measured))

    intra, inter = cost_model.intra_node_bytes_per_s, cost_model.inter_node_bytes_per_s
    found = replace(
        cost_model,
        intra_node_bytes_per_s=left(intra, _INTRA),
        inter_node_bytes_per_s=left(inter, _INTER),
        channels=now,
    )
    words = list(_words(cost_model, found, num_ranks > cost_model.ranks_per_node))
    if not words:
        return cost_model
    channels = f"{now} channel{'s' * (now > 1)}"
    remedy = ""
    if now < CHANNELS and not nccl.is_widened:
        is_old = nccl.version < FIELDS[-1].since
        remedy = f"; {'it' if is_old else 'torch'} gives 4 from {'2.28' if is_old else '2.13'} on"
    why = f"{nccl} gives two of {num_ranks:,} HDP ranks {channels}{remedy}"
    return replace(found, slowed=f"rings are planned at {' and '.join(words)} ({why})")


def _words(before: CostModel, after: CostModel, has_nodes: bool) -> Iterator[str]:
    """What has changed; between nodes only where there are some."""
    for where in ("within a node", "between nodes")[: 1 + has_nodes]:
        name = f"{'intra' if where == 'within a node' else 'inter'}_node_bytes_per_s"
        old, new = getattr(before, name), getattr(after, name)
        if new < old:
            yield f"{new / 1e9:.3g} GB/s {where} instead of {old / 1e9:.3g}"


def channels_of_a_pair(
    version: Version,
    num_ranks: int,
    ranks_per_node: int,
    *,
    max_ctas: int = 0,
    is_widened: bool = True,
    net_gb_per_s: int = 50,
    num_nics: int = 1,
    nvlink_channels: int = 36,
) -> int:
    """Channels that NCCL gives two ranks of a communicator, by its own rules.

    They are those of ``ncclTopoComputeP2pChannels`` and the functions that it calls, in 2.27,
    2.28, 2.29 and 2.30, for nodes that are alike. Defaults are those of an H100 node.

    Args:
        version: NCCL's.
        num_ranks: of the communicator.
        ranks_per_node: that many of them share a node.
        max_ctas: its cap; 0: NCCL's own 32.
        is_widened: whether `widen` was applied.
        net_gb_per_s: bandwidth of the network to which a GPU is near.
        num_nics: network cards that a GPU is near.
        nvlink_channels: of two GPUs of a node.
    """
    field = next((field for field in FIELDS if version >= field.since), None)
    asked = {field.name: field.value} if field is not None and is_widened else {}
    per_net_peer = asked.get("nChannelsPerNetPeer")
    most = _power_of_two_up(min(max_ctas or 32, 32))
    pair = nvlink_channels
    several_nodes = num_ranks > ranks_per_node
    if several_nodes:
        if per_net_peer is not None:
            remote = per_net_peer
        elif version >= (2, 29, 0):
            remote = max(num_nics, -(-net_gb_per_s // 14))
        else:
            remote = max(num_nics, 2 if 2 * num_ranks <= 4 * most else 1)
        pair = min(pair, remote)
    pair = _power_of_two_up(pair)
    if version < (2, 29, 0) or not several_nodes or per_net_peer is not None:
        return min(pair, most)
    peers = min(asked.get("maxP2pPeers", num_ranks), num_ranks)
    while pair * -(-peers // 8) > most and pair > 1:
        pair //= 2
    return pair


def _power_of_two_up(number: int) -> int:
    return 1 << (number - 1).bit_length()

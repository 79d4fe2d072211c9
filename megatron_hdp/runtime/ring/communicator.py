"""The rings' communicator: made once, and connected to the neighbours that rings will have."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_hdp.planner.network import VARIABLES, Nccl
from megatron_hdp.runtime.ring import nccl_channels

_CPU = torch.device("cpu")


def new_ring_group(
    rank_lists: Sequence[Sequence[int]],
    timeout: timedelta | None = None,
    device: torch.device = _CPU,
    max_ctas: int = 0,
    backend: str | None = None,
    tell: Callable[[str], None] | None = None,
) -> dist.ProcessGroup:
    """The communicator of the rings, one for each list of HDP ranks; returns the caller's own.

    It is separate from the group that carries gradient sync, because a rank that has finished its
    micro-batches starts reducing while others still run rings. Every rank of the job must call this
    with the same lists.

    The communicator exists when this returns. Otherwise NCCL would make it, or one for every pair
    of ranks, in the middle of a step. Likewise `connect_neighbours`. No collective makes it, for
    whose rings and trees NCCL would allocate some 300 MB that rings never use.

    Args:
        rank_lists: ranks of the job in the order of the HDP dimension.
        timeout: how long a message may wait for its rank.
        device: where the ranks run.
        max_ctas: blocks of a GPU (CTAs) that NCCL may take at a time; 0: as many as it likes.
        backend: of torch.distributed; that of the job unless given.
        tell: takes one line on what NCCL was asked for; without it a pair of ranks has as many
            channels as NCCL gives it (`nccl_channels`).
    """
    mine, backend = None, backend or dist.get_backend()
    for ranks in rank_lists:
        options = _nccl_options(timeout, max_ctas) if backend == "nccl" else None
        if options is not None and tell is not None:
            asked_for = nccl_channels.widen(options.config, torch.cuda.nccl.version())
            if ranks == rank_lists[0]:
                tell(f"rings' communicator: {asked_for}")
        group = dist.new_group(list(ranks), timeout, backend, options)
        if dist.get_rank() in ranks:
            mine = group
    if mine is None:
        raise ValueError(f"rank {dist.get_rank()} is in none of the lists {list(rank_lists)}")
    if backend == "nccl" and mine.size() > 1:
        mine._get_backend(device).eager_connect_single_device(device)
    connect_neighbours(mine, device)
    return mine


def running_nccl(max_ctas: int) -> Nccl | None:
    """The NCCL of this process, as the rings' communicator is made.

    None where a variable of the user's decides how many channels it gives.
    """
    if any(name in os.environ for name in VARIABLES):
        return None
    version = torch.cuda.nccl.version()[:3]
    asked_for = nccl_channels.widen(_nccl_options(None, max_ctas).config, version)
    return Nccl(version, asked_for in nccl_channels.ASKED, max_ctas)


def _nccl_options(timeout: timedelta | None, max_ctas: int) -> Any:
    """A stream whose kernels start before others that wait for room, and few blocks for them.

    Attention fills the GPU: without priority a transfer starts when one of its kernels ends, and
    what it takes of the GPU, attention lacks.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if max_ctas:
        options.config.max_ctas = max_ctas
    if timeout is not None:
        options._timeout = timeout  # torch warns of options that say another one
    return options


def neighbour_rounds(num_ranks: int) -> list[list[tuple[int, int]]]:
    """Pairs of ranks that are likely to be neighbours in a ring, each rank once in a round.

    Rings are blocks of consecutive ranks, most of them of a power of two that begin at a multiple
    of it: neighbours stand side by side, and the last one of a block sends to its first. That is
    1.5 pairs for each rank.

    Args:
        num_ranks: of the HDP dimension.
    """
    rounds = [[(rank, rank + 1) for rank in range(first, num_ranks - 1, 2)] for first in (0, 1)]
    size = 4
    while size <= num_ranks:
        starts = range(0, num_ranks - size + 1, size)
        rounds.append([(start, start + size - 1) for start in starts])
        size *= 2
    if num_ranks & (num_ranks - 1):  # no block: the ring of all
        rounds.append([(0, num_ranks - 1)])
    return [pairs for pairs in rounds if pairs]


def counterpart_rounds(num_ranks: int, ranks_per_node: int) -> list[list[tuple[int, int]]]:
    """The same of double rings: a rank and its counterpart in a node that is likely the next one.

    Args:
        num_ranks: of the HDP dimension.
        ranks_per_node: HDP ranks of a node.
    """
    size, rounds = ranks_per_node, neighbour_rounds(num_ranks // ranks_per_node)
    return [[(a * size + i, b * size + i) for a, b in one for i in range(size)] for one in rounds]


def connect_neighbours(group: dist.ProcessGroup, device: torch.device = _CPU) -> None:
    """Sends a number between all pairs of `neighbour_rounds`; every rank of `group` must call this.

    NCCL connects two ranks when they first talk. That blocks both, and takes memory that PyTorch
    does not count, so it shall not happen in the middle of a step. Rounds are the same on all
    ranks, and in each a rank has one other at most, with which it exchanges: whoever is in the
    earliest unfinished round finds its partner there, or on the way to it.
    """
    _connect(group, neighbour_rounds(group.size()), device)


def connect_counterparts(
    group: dist.ProcessGroup, ranks_per_node: int, device: torch.device = _CPU
) -> None:
    """The same for all pairs of `counterpart_rounds`."""
    _connect(group, counterpart_rounds(group.size(), ranks_per_node), device)


def _connect(
    group: dist.ProcessGroup, rounds: Sequence[Sequence[tuple[int, int]]], device: torch.device
) -> None:
    rank = group.rank()
    for pairs in rounds:
        other = next((a + b - rank for a, b in pairs if rank in (a, b)), None)
        if other is None:
            continue
        sent, received = (torch.zeros(1, device=device) for _ in range(2))
        operations = [
            dist.P2POp(dist.isend, sent, group=group, group_peer=other),
            dist.P2POp(dist.irecv, received, group=group, group_peer=other),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

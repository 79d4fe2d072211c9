"""Parts of different lengths, split sizes as tensors: as on GPUs, so over gloo."""

import pytest
import torch
import torch.distributed as dist

from megatron_hdp.megatron.cpu import stand_in


def exchanges(sizes):
    """Body of a rank: what it gathers, and its share of everyone's sum."""
    me, ranks = dist.get_rank(), len(sizes)
    mine = torch.full((sizes[me], 2), float(me + 1))
    gathered = [torch.empty(size, 2) for size in sizes]
    stand_in.all_gather(gathered, mine, group=dist.group.WORLD)
    share = torch.empty(sizes[me], 2)
    parts = [torch.full((size, 2), float(10**me)) for size in sizes]
    stand_in.reduce_scatter(share, parts, group=dist.group.WORLD)
    sent = torch.full((me + 1, ranks), float(me)).repeat_interleave(ranks, 0)
    arrived = torch.empty(sum(range(1, ranks + 1)), ranks)
    stand_in.all_to_all_single(
        arrived,
        sent,
        output_split_sizes=torch.arange(1, ranks + 1),
        input_split_sizes=torch.full((ranks,), me + 1),
        group=dist.group.WORLD,
    )
    stand_in.barrier(device_ids=[0])
    return [part.tolist() for part in gathered], share.tolist(), arrived[:, 0].tolist()


@pytest.mark.parametrize("sizes", [(2, 2), (1, 3), (3, 0, 1)])
def test_every_rank_has_every_part_and_its_share(run_ranks, sizes):
    ranks = len(sizes)
    total = float(sum(10**rank for rank in range(ranks)))
    for me, (gathered, share, arrived) in enumerate(run_ranks(ranks, exchanges, sizes)):
        assert gathered == [[[rank + 1.0] * 2] * size for rank, size in enumerate(sizes)]
        assert share == [[total] * 2] * sizes[me]
        assert arrived == [float(rank) for rank in range(ranks) for _ in range(rank + 1)]

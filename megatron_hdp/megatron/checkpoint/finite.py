"""Weights that are not finite are never saved: a run that went on from them would be lost."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_hdp.megatron.parallel import compute_device

_SHOWN = 4  # parameters that the message names


def require_finite(model: torch.nn.Module, iteration: int) -> None:
    """Returns if every weight on every rank is a finite number; costs a read of them and one word.

    Raises:
        ValueError: on every rank, naming the first parameters that are not.
    """
    names, parameters = zip(*model.named_parameters(), strict=True)
    with torch.no_grad():
        are_finite = torch.stack([parameter.isfinite().all() for parameter in parameters])
    wrong = (~are_finite.all()).to(torch.int32).to(compute_device())
    dist.all_reduce(wrong, dist.ReduceOp.MAX)
    if not wrong.item():
        return
    mine = [
        name for name, is_finite in zip(names, are_finite.tolist(), strict=True) if not is_finite
    ]
    everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    found = [f"{name} on rank {rank}" for rank, names in enumerate(everyone) for name in names]
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    raise ValueError(
        f"the weights after iteration {iteration} are not finite: {', '.join(found[:_SHOWN])}{more}"
        ", expected finite numbers. Nothing is saved: go on from the last checkpoint with a lower "
        "--lr"
    )

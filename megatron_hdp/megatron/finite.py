"""Weights and gradients that are NaN or infinite on some rank, known on all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist

from megatron_hdp.megatron.parallel import compute_device
from megatron_hdp.runtime.gathering import gathered

_SHOWN = 4  # names of each rank, and in all


def non_finite(
    named: Iterable[tuple[str, torch.Tensor]], whole: Iterable[torch.Tensor] | None = None
) -> tuple[str, ...]:
    """Names the first tensors with a NaN or infinite entry on some rank; empty: there is none.

    Costs one reading and one all-reduced word while all is finite. Every rank must call this; a
    name is that of the first rank that finds it, as ``embedding.weight (rank 2)``. If given, the
    `whole` tensors, fewer and larger, hold all of the named ones and are read instead.
    """
    named = list(named)
    norms = [norm(tensor) for tensor in whole or (tensor for _, tensor in named)]
    is_doubtful = torch.zeros((), dtype=torch.int64, device=compute_device())
    if norms:  # a pipeline stage may hold no parameters at all
        is_doubtful += ~torch.stack(norms).isfinite().all()
    dist.all_reduce(is_doubtful, dist.ReduceOp.MAX)
    if not is_doubtful.item():
        return ()
    # entry by entry: the norm of finite entries may overflow
    found = [name for name, tensor in named if not tensor.isfinite().all()]
    owners: dict[str, int] = {}
    for rank, names in enumerate(gathered(found[:_SHOWN])):
        for name in names:
            owners.setdefault(name, rank)
    return tuple(f"{name} (rank {rank})" for name, rank in owners.items())[:_SHOWN]


def named_parameters(
    chunks: Sequence[torch.nn.Module],
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters of a rank's parts of the model; of several, named by their part, too."""
    for number, chunk in enumerate(chunks):
        part = "" if len(chunks) == 1 else f"part {number}: "
        for name, parameter in chunk.named_parameters():
            yield part + name, parameter


def norm(values: torch.Tensor) -> torch.Tensor:
    """NaN or infinite if an entry is: one reading, faster than any test of entries."""
    values = values.detach()
    return torch.linalg.vector_norm(values, dtype=torch.promote_types(values.dtype, torch.float32))

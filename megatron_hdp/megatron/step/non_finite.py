"""A loss or gradient that is NaN or infinite, traced to its micro-batch and documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel

from megatron_hdp.megatron.parallel import compute_device
from megatron_hdp.runtime.health import largest

_SHOWN_MICRO_BATCHES = 8
_SHOWN_SEQUENCES = 16
_SHOWN_PARAMETERS = 4
_T = TypeVar("_T")


class NonFiniteError(ValueError):
    """A step's loss or gradient is NaN or infinite; raised on every rank before weights change."""


@dataclass(frozen=True)
class NonFinite:
    """One micro-batch of which something on one rank is not a number."""

    micro_batch: int | None
    """Index in the step's plan; None for padding."""
    what: str
    """``loss nan``, for example."""
    sequences: tuple[int, ...]
    """Rows of the sequence table."""
    documents: tuple[int, ...]
    """The document of each sequence, as an index into the token file."""


def gather_words(found: list[NonFinite]) -> tuple[str, ...]:
    """What all ranks found, a line a micro-batch; every rank must call this."""
    lines = [
        f"rank {rank}: micro-batch {one.micro_batch} has {one.what}; "
        f"sequences {_shown(one.sequences)} (documents {_shown(one.documents)} of the token file)"
        for rank, findings in enumerate(_gathered(found))
        for one in findings
    ]
    more = len(lines) - _SHOWN_MICRO_BATCHES
    return (*lines[:_SHOWN_MICRO_BATCHES], *([f"and {more} more"] if more > 0 else []))


def non_finite_parameters(model: DistributedDataParallel) -> tuple[str, ...]:
    """Names the first parameters whose gradient is NaN or infinite on some rank; empty: none is.

    Reads the gradient buffers once. Every rank must call this: it costs an all-reduce of a word.

    Args:
        model: with gradients that are summed over ranks, before the optimizer's step.
    """
    buffers = [*model.buffers, *model.expert_parallel_buffers]
    norms = torch.stack([norm(buffer.grad_data) for buffer in buffers])
    (doubtful,) = largest([not norms.isfinite().all()], compute_device())
    if not doubtful:
        return ()
    found = [  # entry by entry: the norm of finite entries may overflow
        name
        for name, parameter in model.module.named_parameters()
        if parameter.requires_grad and not parameter.main_grad.isfinite().all()
    ]
    owners: dict[str, int] = {}
    for rank, names in enumerate(_gathered(found[:_SHOWN_PARAMETERS])):
        for name in names:
            owners.setdefault(name, rank)
    return tuple(f"{name} (rank {rank})" for name, rank in owners.items())[:_SHOWN_PARAMETERS]


def norm(values: torch.Tensor) -> torch.Tensor:
    """NaN or infinite if an entry is: one reading, faster than any test of entries."""
    return torch.linalg.vector_norm(values, dtype=torch.promote_types(values.dtype, torch.float32))


def _gathered(found: list[_T]) -> list[list[_T]]:
    everyone: list[list[_T]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, found)
    return everyone


def _shown(numbers: tuple[int, ...]) -> str:
    more = len(numbers) - _SHOWN_SEQUENCES
    shown = ", ".join(map(str, numbers[:_SHOWN_SEQUENCES]))
    return f"{shown} and {more} more" if more > 0 else shown

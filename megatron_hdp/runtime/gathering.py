"""What one rank of the job has, finds or meets, all know: nobody is left in a collective."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from megatron_hdp.runtime.host_to_device import numbers_to_device

T = TypeVar("T")

_NONE = -(2**62)


class EveryRankError(ValueError):
    """A mistake that every rank raises in the same place, so that none waits for another."""


def gathered(value: T) -> list[T]:
    """The values of all ranks of the job, by rank; every rank must call this."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def gathered_on_first(value: T) -> list[T] | None:
    """The values of all ranks, by rank, on the first one; every rank must call this."""
    everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, everyone)
    return everyone


def summed_by_name(mine: Mapping[str, float], device: torch.device) -> dict[str, float]:
    """The sums over all ranks of figures by name; some ranks may have none.

    Every rank must call this. It moves no more on many ranks than on few as long as those that have
    figures have the same ones.
    """
    names, rank = list(mine), dist.get_rank()
    mark = zlib.crc32("\0".join(names).encode())
    lowest, least, most = largest([-rank, -mark, mark] if names else [_NONE] * 3, device)
    if lowest == _NONE:
        return {}
    if most != -least:
        everyone = gathered(dict(mine))
        names = list(dict.fromkeys(name for one in everyone for name in one))
        return {name: sum(one.get(name, 0.0) for one in everyone) for name in names}
    shared = [names]
    dist.broadcast_object_list(shared, src=-lowest, device=device)
    sums = torch.tensor([mine.get(name, 0.0) for name in shared[0]], dtype=torch.float64)
    sums = sums.to(device)
    dist.all_reduce(sums)
    return dict(zip(shared[0], sums.tolist(), strict=True))


def from_first_rank(value: T, device: torch.device | None = None) -> T:
    """The first rank's value; every rank must call this."""
    shared = [value]
    dist.broadcast_object_list(shared, src=0, device=device)
    return shared[0]


def largest(values: Sequence[int], device: torch.device) -> list[int]:
    """The largest of every value over all ranks of the job, which give equally many."""
    tensor = numbers_to_device(values, torch.int64, device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return [int(value) for value in tensor.tolist()]


def share_arrays(
    arrays: Sequence[npt.NDArray[np.int64]],
    source: int,
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """Gives every rank of a group what the arrays of one of them hold, in place.

    They travel in 32 bits, through pinned memory; the source does not wait for its device.

    Args:
        arrays: of one shape on all ranks; flat, their numbers fit into 32 bits.
        source: the rank of the job that holds the numbers.
        group: of the ranks that call this.
        device: where the backend wants its tensors.
    """
    ends = np.cumsum([len(array) for array in arrays])
    host = torch.empty(int(ends[-1]), dtype=torch.int32, pin_memory=device.type == "cuda")
    numbers = host.numpy()
    is_source = dist.get_rank() == source
    if is_source:
        np.concatenate(arrays, out=numbers, casting="same_kind")
    packed = host.to(device, non_blocking=True)
    dist.broadcast(packed, source, group)
    if is_source:
        return
    host.copy_(packed)
    for array, part in zip(arrays, np.split(numbers, ends[:-1]), strict=True):
        array[:] = part


def on_every_rank(action: Callable[[], T], device: torch.device) -> T:
    """What an action gives on this rank, unless it raises a ValueError on any rank of the job.

    Every rank must call this.

    Raises:
        EveryRankError: on every rank, with the message of the first one that raised it.
    """
    outcome = outcome_of(action)
    (refused,) = largest([outcome[1] is not None], device)
    if refused:
        messages = gathered(outcome[1])
        rank = next(i for i, one in enumerate(messages) if one is not None)
        where = "" if len(set(messages)) == 1 else f"rank {rank}: "
        raise EveryRankError(f"{where}{messages[rank]}")
    return outcome[0]  # type: ignore[return-value]


def on_first_rank(action: Callable[[], T], device: torch.device) -> T:
    """What an action gives on the first rank, where alone it runs; every rank must call this.

    Raises:
        EveryRankError: on every rank, with the message of the first rank's.
    """
    outcome = outcome_of(action) if dist.get_rank() == 0 else (None, None)
    result, problem = from_first_rank(outcome, device)
    if problem is not None:
        raise EveryRankError(problem)
    return result  # type: ignore[return-value]


def outcome_of(action: Callable[[], T]) -> tuple[T | None, str | None]:
    """What an action returns, or the message of the ValueError that it raises."""
    try:
        return action(), None
    except ValueError as error:
        return None, str(error)

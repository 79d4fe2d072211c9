"""Ranks of a session agree on a step before anything of it is communicated, or all stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from megatron_hdp.megatron.parallel import compute_device
from megatron_hdp.runtime.health import largest

T = TypeVar("T")


def on_all_ranks(function: Callable[[], T]) -> T:
    """Returns what a function gives on this rank, unless it refuses on any of them.

    Every rank of the job must call this.

    Raises:
        ValueError: on every rank, with the message of the first one whose function raised it.
    """
    found, refusal = None, None
    try:
        found = function()
    except ValueError as error:
        refusal = error
    (refused,) = largest([refusal is not None], compute_device())
    if not refused:
        assert found is not None
        return found
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, None if refusal is None else str(refusal))
    rank = next(i for i, one in enumerate(messages) if one is not None)
    everyone = all(one == messages[rank] for one in messages)
    where = "" if everyone else f"rank {rank}: "
    raise ValueError(f"{where}{messages[rank]}") from refusal

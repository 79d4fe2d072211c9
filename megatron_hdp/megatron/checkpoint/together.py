"""What one rank finds or meets, every rank returns or raises: none is left in a collective."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron_hdp.megatron.parallel import compute_device
from megatron_hdp.runtime import gathering

T = TypeVar("T")
R = TypeVar("R")


def on_first_rank(action: Callable[[], T]) -> T:
    """Calls `action` on the first rank; every rank gets what it returned or raised.

    Raises:
        ValueError: the first rank met a ValueError, or an error of the file system.
    """
    return gathering.on_first_rank(lambda: _explained(action), compute_device())


def on_every_rank(action: Callable[[], T], then: Callable[[list[T]], R]) -> R:
    """Calls `action` on every rank, and `then` on the first with what all returned, by rank.

    Every rank gets what `then` returned: no other rank holds what all have given.

    Raises:
        ValueError: a rank met a ValueError, or an error of the file system; the same on every rank.
    """
    mine = gathering.on_every_rank(lambda: _explained(action), compute_device())
    everyone = gathering.gathered_on_first(mine)
    return on_first_rank(lambda: then(everyone or []))


def require_shared(folder: Path, flag: str) -> None:
    """Raises on every rank if a rank does not see the folder that the first rank sees."""
    missing = torch.tensor([not folder.is_dir()], dtype=torch.int, device=compute_device())
    dist.all_reduce(missing)
    if missing.item():
        raise ValueError(
            f"{missing.item()} of {dist.get_world_size()} ranks do not see {folder}: give {flag} a "
            "folder on storage that all ranks share"
        )


def _explained(action: Callable[[], T]) -> T:
    try:
        return action()
    except OSError as error:
        raise ValueError(
            f"{error}: --save needs a folder to write into, --load one to read"
        ) from error

"""What one rank finds or meets, every rank returns or raises: none is left in a collective."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_hdp.megatron.parallel import compute_device

T = TypeVar("T")


def on_first_rank(action: Callable[[], Any]) -> Any:
    """Calls `action` on the first rank; every rank gets what it returned or raised.

    Raises:
        ValueError: the first rank met a ValueError, or an error of the file system.
    """
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        answer = list(_outcome(action))
    dist.broadcast_object_list(answer, src=0, device=compute_device())
    result, problem = answer
    if problem is not None:
        raise ValueError(problem)
    return result


def on_every_rank(action: Callable[[], T]) -> list[T]:
    """Calls `action` on every rank; each gets what all of them returned, by rank.

    Raises:
        ValueError: a rank met a ValueError, or an error of the file system; the same on every rank.
    """
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, _outcome(action))
    problems = [problem for _, problem in outcomes if problem is not None]
    if problems:
        raise ValueError(problems[0])
    return [result for result, _ in outcomes]


def require_shared(folder: Path, flag: str) -> None:
    """Raises on every rank if a rank does not see the folder that the first rank sees."""
    missing = torch.tensor([not folder.is_dir()], dtype=torch.int, device=compute_device())
    dist.all_reduce(missing)
    if missing.item():
        raise ValueError(
            f"{missing.item()} of {dist.get_world_size()} ranks do not see {folder}: give {flag} a "
            "folder on storage that all ranks share"
        )


def _outcome(action: Callable[[], T]) -> tuple[T | None, str | None]:
    try:
        return action(), None
    except ValueError as error:
        return None, str(error)
    except OSError as error:
        return None, f"{error}: --save needs a folder to write into, --load one to read"

"""A loss that is NaN or infinite, traced to its micro-batch, sequences and documents."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

_SHOWN_MICRO_BATCHES = 8
_SHOWN_SEQUENCES = 16


class NonFiniteLossError(ValueError):
    """The loss of a step is NaN or infinite; raised on every rank before weights change."""


@dataclass(frozen=True)
class NonFinite:
    """One micro-batch whose loss on one rank is not a number."""

    micro_batch: int | None
    """Index in the step's plan; None for padding."""
    loss: float
    sequences: tuple[int, ...]
    """Rows of the sequence table."""
    documents: tuple[int, ...]
    """The document of each sequence, as an index into the token file."""


def gather_words(found: list[NonFinite]) -> tuple[str, ...]:
    """What all ranks found, a line a micro-batch; every rank must call this."""
    everyone: list[list[NonFinite]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, found)
    lines = [
        f"rank {rank}: micro-batch {one.micro_batch} has loss {one.loss}; "
        f"sequences {_shown(one.sequences)} (documents {_shown(one.documents)} of the token file)"
        for rank, findings in enumerate(everyone)
        for one in findings
    ]
    more = len(lines) - _SHOWN_MICRO_BATCHES
    return (*lines[:_SHOWN_MICRO_BATCHES], *([f"and {more} more"] if more > 0 else []))


def _shown(numbers: tuple[int, ...]) -> str:
    more = len(numbers) - _SHOWN_SEQUENCES
    shown = ", ".join(map(str, numbers[:_SHOWN_SEQUENCES]))
    return f"{shown} and {more} more" if more > 0 else shown

"""A loss or gradient that is NaN or infinite, traced to its micro-batch and documents."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.distributed import DistributedDataParallel

from megatron_hdp.data.mixture import Corpus
from megatron_hdp.data.steps import RankStep
from megatron_hdp.megatron.finite import named_parameters, non_finite
from megatron_hdp.runtime.gathering import EveryRankError, gathered

_SHOWN_MICRO_BATCHES = 8


class NonFiniteError(EveryRankError):
    """A step's loss or gradient is NaN or infinite; raised on every rank before weights change."""


@dataclass(frozen=True)
class NonFinite:
    """One micro-batch of which something on one rank is not a number, ``loss nan`` for example."""

    micro_batch: int | None
    """Index in the step's plan; None for padding."""
    what: str
    documents: str
    """What is in it, in words."""


def non_finite_of(
    step: RankStep, corpus: Corpus, name: str, values: Sequence[float]
) -> list[NonFinite]:
    """This rank's micro-batches of which `name`'s value, given in order, is not finite."""
    found = []
    for micro_batch, value in zip(step.micro_batches, values, strict=False):
        if not math.isfinite(value):
            places = [step.share.place_of(i) for i in micro_batch.sequence_ids]
            documents = corpus.words_for(micro_batch.sources, step.share.rows[places].tolist())
            found.append(NonFinite(micro_batch.index, f"{name} {value}", documents))
    return found


def gather_words(found: list[NonFinite]) -> tuple[str, ...]:
    """What all ranks found, a line a micro-batch; every rank must call this."""
    lines = [
        f"rank {rank}: micro-batch {one.micro_batch} has {one.what}: {one.documents}"
        for rank, findings in enumerate(gathered(found))
        for one in findings
    ]
    more = len(lines) - _SHOWN_MICRO_BATCHES
    return (*lines[:_SHOWN_MICRO_BATCHES], *([f"and {more} more"] if more > 0 else []))


def non_finite_parameters(chunks: Sequence[DistributedDataParallel]) -> tuple[str, ...]:
    """Names the first parameters whose gradient is NaN or infinite on some rank; see `non_finite`.

    Gradients are summed over ranks, and the optimizer has not seen them.
    """
    return non_finite(
        (
            (name, one.main_grad)
            for name, one in named_parameters([chunk.module for chunk in chunks])
            if one.requires_grad
        ),
        [
            buffer.grad_data
            for chunk in chunks
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ],
    )

"""What one rank gets of a step: its share, read, and the totals that all ranks know."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_hdp.data.steps.micro_batch import (
    RankMicroBatch,
    Reader,
    TokenSource,
    read_micro_batch,
)
from megatron_hdp.data.steps.share import RankShare
from megatron_hdp.data.steps.totals import StepTotals


@dataclass(frozen=True)
class LostSource:
    """What a rank was not given of a source that has failed."""

    name: str
    why: str
    ids: tuple[int, ...]
    """Places in the step of its sequences in this rank's share: they stand in its micro-batches
    with token 0 and without loss."""


@dataclass(frozen=True)
class RankStep:
    """A step as one rank runs it."""

    totals: StepTotals
    share: RankShare
    micro_batches: tuple[RankMicroBatch, ...]
    """Padding included, in the order in which they run."""
    lost: tuple[LostSource, ...] = ()


def read_step(
    totals: StepTotals, share: RankShare, reader: Reader, source: TokenSource
) -> RankStep:
    """Read a rank's share of a step.

    Args:
        totals: of the step.
        share: the rank's.
        reader: what it reads.
        source: where tokens come from.
    """
    micro_batches = tuple(
        read_micro_batch(share, slot, reader, source) for slot in range(share.num_slots)
    )
    return RankStep(totals, share, micro_batches)

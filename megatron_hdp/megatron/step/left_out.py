"""Sequences that are taken out of a step: they hold no token and no loss on any rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_hdp.data.steps import Amounts, RankStep
from megatron_hdp.runtime.gathering import gathered


@dataclass(frozen=True, order=True)
class LeftOut:
    """What the step loses with it."""

    sequence_id: int
    """Its place in the step."""
    source: int
    row: int
    length: int
    num_loss_tokens: int


def found_by_all(step: RankStep, sequence_ids: Iterable[int]) -> list[LeftOut]:
    """Takes sequences that any rank has found out of this rank's micro-batches.

    A sequence may be read by several ranks, so all of them must hear of what one of them found: the
    loss tokens of the whole sequence leave the global batch. Every rank of the job must call this.

    Args:
        step: of this rank.
        sequence_ids: what it has found.

    Returns:
        Those of the whole step, in its order, alike on every rank.
    """
    mine = [_found(step, i) for i in sequence_ids]
    everyone = sorted({one for of_rank in gathered(mine) for one in of_rank})
    ids = {one.sequence_id for one in everyone}
    for micro_batch in step.micro_batches:
        micro_batch.drop(ids)
    return everyone


def amounts_without(amounts: Amounts, left_out: Sequence[LeftOut]) -> Amounts:
    """What is left of a step."""
    for one in left_out:
        amounts = amounts.without(one.source, one.length, one.num_loss_tokens)
    return amounts


def _found(step: RankStep, sequence_id: int) -> LeftOut:
    share = step.share
    place = share.place_of(sequence_id)
    columns = (share.sources, share.rows, share.lengths, share.num_loss_tokens)
    return LeftOut(sequence_id, *(int(column[place]) for column in columns))

"""What each rank encodes at a time, as a plan of items says it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megatron_hdp.arrays import Int32Array, Int64Array
from megatron_hdp.media import ItemPlan
from megatron_hdp.megatron.media.items import BatchMedia
from megatron_hdp.runtime.pieces import Members

Pieces = Mapping[int, Mapping[int, Int64Array]]
"""Of each cut item the rows that each of its ranks makes; one may make none: an item may have fewer
windows than ranks."""


class Piece(NamedTuple):
    """What one rank has of a cut item, as ``encode_piece`` takes it."""

    degree: int
    member: int
    gather: Members
    """Those that have something of it."""


@dataclass(frozen=True)
class EncoderCall:
    """What one rank encodes at a time: whole items, or its piece of one that is cut."""

    items: tuple[int, ...]
    rows: Int64Array
    """The numbers of the rows that it makes, in their order."""
    wave: int
    """With which they travel."""
    piece: Piece | None = None
    """Of a cut item."""

    def __str__(self) -> str:
        """Return its items by number."""
        return f"items {', '.join(map(str, self.items))}"


def pieces_of(media: BatchMedia, plan: ItemPlan, encoder: Any) -> Pieces:
    """Who makes which rows of the cut items."""
    found = {}
    for item in np.flatnonzero(plan.is_cut).tolist():
        first, rows = int(plan.first_ranks[item]), media.firsts[item]
        pieces = encoder.rows_of_pieces(media.items[item], int(plan.degrees[item]))
        found[item] = {first + i: rows + one for i, one in enumerate(pieces) if len(one)}
    return found


def makers_of(media: BatchMedia, plan: ItemPlan, pieces: Pieces) -> Int32Array:
    """The rank that makes each row, ``[rows]``."""
    found = np.repeat(plan.first_ranks, media.counts)
    for of_item in pieces.values():
        for rank, rows in of_item.items():
            found[rows] = rank
    return found


def calls_of(
    media: BatchMedia, plan: ItemPlan, pieces: Pieces, encoder: Any, waves: Int32Array, rank: int
) -> list[EncoderCall]:
    """The calls of a rank in their order: of a wave, its pieces of cut items, then its packs."""
    calls = []
    for item, of_item in pieces.items():
        if rank in of_item:
            ranks = list(of_item)
            sizes = [encoder.patches_per_row * len(one) for one in of_item.values()]
            members = Members(ranks, ranks.index(rank), sizes)
            degree, member = int(plan.degrees[item]), rank - int(plan.first_ranks[item])
            piece = Piece(degree, member, members)
            calls.append(EncoderCall((item,), of_item[rank], int(waves[item]), piece))
    calls.sort(key=lambda one: (plan.phases[one.items[0]], plan.turns[one.items[0]]))
    mine = np.flatnonzero((plan.first_ranks == rank) & ~plan.is_cut)
    order = np.lexsort((mine, plan.turns[mine], plan.phases[mine]))
    packs: dict[tuple[int, int], list[int]] = {}
    for item in mine[order].tolist():
        packs.setdefault((int(plan.phases[item]), int(plan.turns[item])), []).append(item)
    for pack in packs.values():
        rows = np.concatenate([media.rows_of(item) for item in pack])
        calls.append(EncoderCall(tuple(pack), rows, int(waves[pack[0]])))
    return sorted(calls, key=lambda one: one.wave)


def work_of_calls(calls: Sequence[EncoderCall], patches: Int64Array) -> list[float]:
    """Patches, their squares over items, and calls of a rank, as of `LearntCost.observe`.

    Zeros where it has a piece of a cut item: it waits for others there.

    Args:
        calls: of the rank.
        patches: of each item of the step, ``[items]``.
    """
    if any(one.piece is not None for one in calls):
        return [0.0] * 3
    mine = patches[[item for one in calls for item in one.items]].astype(np.float64)
    return [float(mine.sum()), float((mine**2).sum()), float(len(calls))]

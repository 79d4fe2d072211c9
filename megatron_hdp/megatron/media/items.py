"""Images and other items among the tokens of a global batch, and what makes rows of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch

from megatron_hdp.arrays import BoolArray, Int64Array
from megatron_hdp.data.mixture import Step
from megatron_hdp.data.steps import RankMicroBatch
from megatron_hdp.media import ItemCostModel, RowGrid, row_positions
from megatron_hdp.media.rows import rows_of_tokens


class MediaEncoder(Protocol):
    """A torch module that makes rows of items; the same weights on every rank of the job.

    It may have more, as `encoders.PatchEncoder` has: ``levels``, how many times the hidden size
    its rows are wide, the levels behind the first being added behind decoder layers (deepstack);
    ``positions``, an `MRope` by which its rows, of a ``grid(item)``, turn queries and keys; and, as
    `encoders.CutEncoder` has them, ``most_ranks(items)``, ``rows_of_pieces(item, degree)`` and
    ``encode_piece(item, degree, member, gather)``, with which several ranks encode a large item.
    """

    cost: ItemCostModel
    """By which items are planned."""
    patches_per_row: int
    """Patches that become one row."""
    patches_per_pack: int
    """The most patches of items that are given to one call."""

    def patches(self, item: Any) -> int:
        """Patches of an item, from its size alone: a multiple of `patches_per_row`."""
        ...

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Its weights, as of a module."""
        ...

    def __call__(self, items: Sequence[Any]) -> torch.Tensor:
        """Rows of items, one behind another, ``[rows, levels * hidden]``.

        Each must depend on its own item alone, and on nothing that is drawn.
        """
        ...


@dataclass(frozen=True)
class MediaItem:
    """An image, or anything else that an encoder makes rows of, in a sequence."""

    sequence: int
    """Its place in the batch."""
    start: int
    """The first of its tokens there; it has as many as the encoder makes rows. Their ids say
    nothing, and nothing learns to predict them."""
    data: Any
    """What the encoder is given."""


class ItemHolder(Protocol):
    """A global batch with items: its tokens lie sequence by sequence, one behind another."""

    media: list[MediaItem]
    lengths: Int64Array
    """Tokens of each sequence."""
    offsets: Int64Array
    """Where each begins."""
    loss_mask: BoolArray
    """Of each token, whether it is trained; items and damages are taken out of it."""

    def step(self) -> Step:
        """Its sequences as a step that was drawn."""
        ...


@dataclass(frozen=True)
class BatchMedia:
    """The items of a batch: items in the order in which they were given, rows item after item."""

    items: Sequence[Any]
    counts: Int64Array
    """Rows of each, ``[items]``."""
    row_of_token: Int64Array
    """Of each of the batch's tokens; -1 where it is one, ``[tokens]``."""
    runs: Mapping[int, Sequence[int | RowGrid]]
    """By sequence with items, where positions have three axes: tokens of text and items."""

    @classmethod
    def of(cls, batch: ItemHolder, encoder: MediaEncoder) -> BatchMedia:
        """The items of a batch, whose tokens lose their loss.

        Raises:
            ValueError: an item that its sequence has no room for, or that shares tokens.
        """
        counts, places = [], []
        for i, one in enumerate(batch.media):
            patches, per_row = encoder.patches(one.data), encoder.patches_per_row
            if patches < 1 or patches % per_row:
                raise ValueError(
                    f"found item {i} of {patches} patches, expected a multiple of {per_row}"
                )
            if not 0 <= one.sequence < len(batch.lengths):
                raise ValueError(
                    f"found item {i} in sequence {one.sequence}, expected one of the "
                    f"{len(batch.lengths)} of the batch"
                )
            length, rows = int(batch.lengths[one.sequence]), patches // per_row
            if one.start < 0 or one.start + rows > length:
                raise ValueError(
                    f"found item {i} of {rows} rows at token {one.start} of sequence "
                    f"{one.sequence}, expected room for them among its {length} tokens"
                )
            counts.append(rows)
            places.append(int(batch.offsets[one.sequence]) + one.start)
        of_each = np.array(counts, dtype=np.int64)
        starts = np.array(places, dtype=np.int64)
        found = rows_of_tokens(len(batch.loss_mask), starts, of_each)
        batch.loss_mask[found >= 0] = False
        runs = {} if getattr(encoder, "positions", None) is None else _runs_of(batch, encoder)
        return cls([one.data for one in batch.media], of_each, found, runs)

    @property
    def num_rows(self) -> int:
        """Of all items."""
        return int(self.counts.sum())

    @cached_property
    def firsts(self) -> Int64Array:
        """The number of each item's first row, ``[items]``."""
        return np.cumsum(self.counts) - self.counts

    def only(self, items: Int64Array) -> BatchMedia:
        """Some of them by themselves, in no sequence."""
        some = [self.items[item] for item in items.tolist()]
        return BatchMedia(some, self.counts[items], np.zeros(0, dtype=np.int64), {})

    def rows_of(self, item: int) -> Int64Array:
        """The numbers of an item's rows."""
        return np.arange(self.firsts[item], self.firsts[item] + self.counts[item])

    def rows_in(self, batch: ItemHolder, micro_batch: RankMicroBatch) -> Int64Array:
        """The row of each token of a micro-batch, -1 where there is none, ``[t]``."""
        ids = np.array([*micro_batch.sequence_ids, 0])[micro_batch.sequence_index]
        is_there = micro_batch.sequence_index >= 0
        is_there &= micro_batch.positions < batch.lengths[ids]
        places = np.where(is_there, batch.offsets[ids] + micro_batch.positions, 0)
        return np.where(is_there, self.row_of_token[places], -1)

    def with_text_behind(self, batch: ItemHolder, micro_batch: RankMicroBatch) -> RankMicroBatch:
        """The micro-batch, which predicts no further token by one of an item.

        MTP layers are given the embeddings of the tokens before, of which items have none there.
        """
        depths = micro_batch.further_mask.reshape(-1, len(micro_batch.tokens)).copy()
        ids = np.array([*micro_batch.sequence_ids, 0])[micro_batch.sequence_index]
        given = np.zeros(len(micro_batch.tokens), dtype=np.bool_)
        for depth, mask in enumerate(depths):
            behind = micro_batch.positions + depth + 1
            is_there = (micro_batch.sequence_index >= 0) & (behind < batch.lengths[ids])
            rows = self.row_of_token[np.where(is_there, batch.offsets[ids] + behind, 0)]
            given |= is_there & (rows >= 0)
            mask &= ~given
        return replace(micro_batch, further_mask=depths.ravel())

    def with_positions(self, micro_batch: RankMicroBatch) -> RankMicroBatch:
        """The micro-batch, its tokens' positions on three axes where it has items' sequences."""
        ids = micro_batch.sequence_ids
        if self.runs.keys().isdisjoint(ids):
            return micro_batch
        found = np.tile(micro_batch.positions, (3, 1))
        for place, i in enumerate(ids):
            if i in self.runs:
                of_sequence = row_positions(self.runs[i])
                here = micro_batch.sequence_index == place
                here &= micro_batch.positions < of_sequence.shape[1]
                found[:, here] = of_sequence[:, micro_batch.positions[here]]
        return replace(micro_batch, axis_positions=found.ravel())


def _runs_of(batch: ItemHolder, encoder: Any) -> dict[int, list[int | RowGrid]]:
    """Text and items of each sequence that has items, in the order of its tokens."""
    of_sequence: dict[int, list[MediaItem]] = {}
    for one in batch.media:
        of_sequence.setdefault(one.sequence, []).append(one)
    found: dict[int, list[int | RowGrid]] = {}
    for i, items in of_sequence.items():
        runs, at = found.setdefault(i, []), 0
        for one in sorted(items, key=lambda item: item.start):
            runs += [one.start - at, grid := encoder.grid(one.data)]
            at = one.start + grid.num_rows
            if (rows := encoder.patches(one.data) // encoder.patches_per_row) != grid.num_rows:
                raise ValueError(
                    f"found an item of sequence {i} with a grid of {grid.t} x {grid.h} x {grid.w} "
                    f"rows, expected {rows} by its patches: the encoder's grid counts rows"
                )
        runs.append(int(batch.lengths[i]) - at)
    return found

"""Images and other items among the tokens of a session's batch, encoded over all ranks of the job.

A step encodes its items without a graph, each rank those that the plan gives it; their rows go to
the ranks whose tokens they stand for, where they replace embeddings. Behind the step the rows'
gradients go back; each pack is encoded once more, now with a graph, and differentiated. Gradients
stay sums over items, so they are those of one rank that encoded all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from megatron_hdp.arrays import BoolArray, Int32Array, Int64Array
from megatron_hdp.data.steps import PlanSettings, RankMicroBatch, Reader, read_micro_batch
from megatron_hdp.media import (
    ItemBatch,
    ItemCostModel,
    ItemPlan,
    RowGrid,
    plan_items,
    row_positions,
)
from megatron_hdp.media.rows import RowExchange, row_exchange, rows_of_tokens
from megatron_hdp.megatron.model import FIRST_MARK, require_layers, rows_for_marks, turn_by_axes
from megatron_hdp.megatron.options import TrainingArguments
from megatron_hdp.megatron.parallel import RankPlace, compute_device
from megatron_hdp.planner import Plan
from megatron_hdp.runtime.gathering import on_every_rank
from megatron_hdp.session.batch import CheckedBatch, MediaItem, shares_of
from megatron_hdp.session.damaged import decode_pictures


class MediaEncoder(Protocol):
    """A torch module that makes rows of items; the same weights on every rank of the job.

    It may have more, as `encoders.PatchEncoder` has: ``levels``, how many times the hidden size
    its rows are wide, the levels behind the first being added behind decoder layers (deepstack);
    and ``positions``, an `MRope` by which its rows, of a ``grid(item)``, turn queries and keys.
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


class SessionMedia:
    """What a session has of an encoder, at its place in the job."""

    def __init__(
        self,
        encoder: MediaEncoder,
        arguments: TrainingArguments,
        chunks: Sequence[Any],
        place: RankPlace,
        settings: PlanSettings,
        reader: Reader,
        balance: str,
    ) -> None:
        """Every rank of the job must call this.

        Raises:
            ValueError: ranks of the job lie in another order than Megatron's, or the model has no
                layers or no frequencies for the encoder's rows.
        """
        self.encoder, self.place, self.chunks = encoder, place, chunks
        self.is_sharded, self.hidden = arguments.sequence_parallel, arguments.hidden_size
        self.balance, self._settings = balance, settings
        self.dtype = _dtype_of(encoder)
        self.levels: int = getattr(encoder, "levels", 1)
        self._reader = replace(reader, reads_tokens=False, reads_mask=False)
        self._rank = dist.get_rank()
        on_every_rank(self._require_model, compute_device())

    @property
    def width(self) -> int:
        """Of a row: all of its levels."""
        return self.levels * self.hidden

    def prepare(self, batch: CheckedBatch, plan: Plan) -> None:
        """Finds what this rank does with a batch's items; communicates nothing."""
        if batch.items is not None:
            batch.step_media = self._prepared(batch, batch.items, plan)

    def _prepared(self, batch: CheckedBatch, media: BatchMedia, plan: Plan) -> StepMedia:
        place = self.place
        wanted: list[Int64Array] = [np.zeros(0, dtype=np.int64)] * dist.get_world_size()
        first_slots = np.zeros(media.num_rows, dtype=np.int32)
        readers = np.zeros(media.num_rows, dtype=np.int32)
        for share in shares_of(self._settings, batch, plan, range(place.num_hdp_ranks)):
            reader = replace(self._reader, hdp_rank=share.hdp_rank)
            found: list[list[Int64Array]] = [[] for _ in range(place.num_tensor_ranks)]
            for slot in range(share.num_slots):
                micro_batch = read_micro_batch(share, slot, reader, batch)
                rows = media.rows_in(batch, micro_batch)
                first_slots[rows[rows >= 0]] = slot
                for tensor_rank, of_rank in enumerate(found):
                    of_rank.append(rows[self.is_of(tensor_rank, micro_batch) & (rows >= 0)])
            for tensor_rank, of_rank in enumerate(found):
                rank = self._rank_at(share.hdp_rank, tensor_rank)
                wanted[rank] = np.concatenate([*of_rank, np.zeros(0, dtype=np.int64)])
                readers[wanted[rank]] = rank
        items = self._planned(media, readers, first_slots)
        makers = np.repeat(items.first_ranks, media.counts)
        packs = _packs_of(items, self._rank)
        made = [media.rows_of(item) for pack in packs for item in pack]
        exchange = row_exchange(
            self._rank, wanted, makers, np.concatenate([*made, np.zeros(0, dtype=np.int64)])
        )
        return StepMedia(self, batch, media, packs, wanted[self._rank], exchange)

    def _planned(self, media: BatchMedia, readers: Int32Array, slots: Int32Array) -> ItemPlan:
        per_row = self.encoder.patches_per_row
        batch = ItemBatch(
            patches=media.counts * per_row,
            consumers=readers[media.firsts],
            micro_batches=slots[media.firsts],
            num_ranks=dist.get_world_size(),
            ranks_per_node=dist.get_world_size(),
            patches_per_row=per_row,
            patches_per_pack=self.encoder.patches_per_pack,
            most_ranks=1,
        )
        return plan_items(batch, self.encoder.cost, self.balance)

    def is_of(self, tensor_rank: int, micro_batch: RankMicroBatch) -> BoolArray:
        """Which tokens' embeddings a tensor rank has, ``[t]``: all, or its share of each part."""
        ranks = self.place.num_tensor_ranks if self.is_sharded else 1
        sizes = [len(part.tokens) // ranks for part in micro_batch.in_parts()]
        is_here = np.arange(ranks) == (tensor_rank if self.is_sharded else 0)
        return np.concatenate([np.repeat(is_here, size) for size in sizes])

    def _rank_at(self, hdp_rank: int, tensor_rank: int) -> int:
        """The rank of the job on the first stage."""
        return tensor_rank + self.place.num_tensor_ranks * hdp_rank

    def _require_model(self) -> None:
        place = self.place
        for chunk in self.chunks:
            turn_by_axes(chunk, getattr(self.encoder, "positions", None))
        if place.is_first_stage:
            require_layers(self.chunks[0], self.levels - 1)
        found = self._rank_at(place.hdp_rank + place.num_hdp_ranks * place.stage, place.tensor_rank)
        if found != self._rank:
            raise ValueError(
                f"found rank {self._rank} of the job where rank {found} was expected: an encoder's "
                "rows go by Megatron's order of ranks, tensor, data, pipeline"
            )


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
    def of(cls, batch: CheckedBatch, encoder: MediaEncoder) -> BatchMedia:
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
        found = rows_of_tokens(len(batch.token_ids), starts, of_each)
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

    def rows_of(self, item: int) -> Int64Array:
        """The numbers of an item's rows."""
        return np.arange(self.firsts[item], self.firsts[item] + self.counts[item])

    def rows_in(self, batch: CheckedBatch, micro_batch: RankMicroBatch) -> Int64Array:
        """The row of each token of a micro-batch, -1 where there is none, ``[t]``."""
        ids = np.array([*micro_batch.sequence_ids, 0])[micro_batch.sequence_index]
        is_there = micro_batch.sequence_index >= 0
        is_there &= micro_batch.positions < batch.lengths[ids]
        places = np.where(is_there, batch.offsets[ids] + micro_batch.positions, 0)
        return np.where(is_there, self.row_of_token[places], -1)

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


@dataclass(frozen=True)
class StepMedia:
    """What one rank does with the items of one step."""

    session: SessionMedia
    batch: CheckedBatch
    media: BatchMedia
    packs: list[list[int]]
    """Items of each call of the encoder on this rank."""
    wanted: Int64Array
    """Rows of this rank's tokens, in their order."""
    exchange: RowExchange

    def decode(self, most_damaged: int) -> None:
        """Decodes pictures that this rank encodes; see `damaged.decode_pictures`."""
        decode_pictures(self.batch, [item for pack in self.packs for item in pack], most_damaged)

    @contextmanager
    def rows_in_place(
        self, micro_batches: Sequence[RankMicroBatch], divisor: float, forward_only: bool
    ) -> Iterator[tuple[RankMicroBatch, ...]]:
        """Within it embeddings of items' tokens are their rows; behind it gradients are back.

        Yields the micro-batches that are to run.

        Every rank must enter it, with micro-batches that have just been read.

        Raises:
            EveryRankError: the encoder raised a ValueError on some rank, or made other rows on its
                second run than on its first.
        """
        encoder = self.session.encoder
        weights = [one for one in encoder.parameters() if one.requires_grad]
        learns = bool(weights) and not forward_only
        device = compute_device()
        made = on_every_rank(self._encoded, device)
        rows = self._sent(made, self.exchange.send, self.exchange.receive, is_back=False)
        levels = [one.contiguous().requires_grad_(learns) for one in self._levels_of(rows)]
        placed = tuple(self.media.with_positions(one) for one in micro_batches)
        if not self.session.place.is_first_stage:
            yield placed
        else:
            for one in placed:
                self._mark(one)
            sharded = self.session.place if self.session.is_sharded else None
            with rows_for_marks(self.session.chunks[0], levels, sharded):
                yield placed
        if not learns:
            return
        found = [torch.zeros_like(one) if one.grad is None else one.grad for one in levels]
        gradient = torch.cat(found, dim=1)
        if not self.session.is_sharded and self.session.place.tensor_rank > 0:
            gradient = torch.zeros_like(gradient)  # the same as the first tensor rank's
        of_made = self._sent(gradient, self.exchange.receive, self.exchange.send, is_back=True)
        on_every_rank(lambda: self._differentiate(made, of_made), device)
        for weight in weights:
            summed = torch.zeros_like(weight) if weight.grad is None else weight.grad
            dist.all_reduce(summed)
            weight.grad = summed / divisor

    def _levels_of(self, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        found: Sequence[torch.Tensor] = rows.split(self.session.hidden, dim=1)
        return found

    def _encoded(self) -> torch.Tensor:
        with torch.no_grad():
            found = [self._pack(pack) for pack in self.packs]
        if found:
            return torch.cat(found)
        return torch.zeros(0, self.session.width, dtype=self.session.dtype, device=compute_device())

    def _pack(self, pack: list[int]) -> torch.Tensor:
        rows = self.session.encoder([self.media.items[item] for item in pack])
        expected = (int(self.media.counts[pack].sum()), self.session.width)
        if tuple(rows.shape) != expected or rows.dtype != self.session.dtype:
            raise ValueError(
                f"found rows of shape {tuple(rows.shape)} and {rows.dtype} from the encoder for "
                f"items {', '.join(map(str, pack))}, expected {expected} and {self.session.dtype}, "
                "its weights' type"
            )
        return rows

    def _sent(
        self, rows: torch.Tensor, leave: Int64Array, arrive: Int64Array, *, is_back: bool
    ) -> torch.Tensor:
        """What arrives of all ranks' rows; of gradients the sums, as a row may go to several."""
        counts = self.exchange.send_counts, self.exchange.receive_counts
        outgoing, incoming = reversed(counts) if is_back else counts
        there = torch.from_numpy(leave).to(rows.device)
        coming = rows.new_empty(len(arrive), rows.shape[1])
        dist.all_to_all_single(coming, rows.detach()[there], incoming, outgoing)
        num = int(self.media.counts[sum(self.packs, [])].sum()) if is_back else len(self.wanted)
        found = rows.new_zeros(num, rows.shape[1])
        return found.index_add_(0, torch.from_numpy(arrive).to(rows.device), coming)

    def _mark(self, micro_batch: RankMicroBatch) -> None:
        """Writes the places of rows among `wanted` into the tokens that they stand for."""
        rows = self.media.rows_in(self.batch, micro_batch)
        has_row = rows >= 0
        is_here = self.session.is_of(self.session.place.tensor_rank, micro_batch) & has_row
        place = np.zeros(max(self.media.num_rows, 1), dtype=np.int64)
        place[self.wanted] = np.arange(len(self.wanted))
        micro_batch.tokens[has_row] = FIRST_MARK
        micro_batch.tokens[is_here] += place[rows[is_here]]

    def _differentiate(self, made: torch.Tensor, gradient: torch.Tensor) -> None:
        """Encodes pack by pack once more, and leaves gradients in the encoder's weights."""
        for weight in self.session.encoder.parameters():
            weight.grad = None
        first = 0
        for pack in self.packs:
            with torch.enable_grad():
                rows = self._pack(pack)
            here = slice(first, first + len(rows))
            first = here.stop
            if not torch.equal(rows.detach(), made[here]):
                raise ValueError(
                    f"found other rows of items {', '.join(map(str, pack))} on the encoder's "
                    "second run than on its first, expected the same bits: it may draw nothing "
                    "(dropout) and keep nothing between calls"
                )
            rows.backward(gradient[here])


def with_items(batch: CheckedBatch, media: SessionMedia | None) -> CheckedBatch:
    """The batch, once it is known what its items need.

    Raises:
        ValueError: items without an encoder, or that do not fit into their sequences.
    """
    if batch.media:
        if media is None:
            raise ValueError(
                f"found {len(batch.media)} items in the batch and no encoder, expected one: call "
                "attach_encoder first"
            )
        batch.items = BatchMedia.of(batch, media.encoder)
    return batch


@contextmanager
def rows_in_place(
    batch: CheckedBatch,
    micro_batches: tuple[RankMicroBatch, ...],
    divisor: float,
    forward_only: bool,
) -> Iterator[tuple[RankMicroBatch, ...]]:
    """Within it the model sees the rows of a batch's items; nothing, where it has none.

    Yields the micro-batches that are to run.
    """
    if batch.step_media is None:
        yield micro_batches
        return
    with batch.step_media.rows_in_place(micro_batches, divisor, forward_only) as placed:
        yield placed


def _dtype_of(encoder: MediaEncoder) -> torch.dtype:
    """Of its rows, which ranks without items receive as well."""
    for weight in encoder.parameters():
        return weight.dtype
    raise ValueError("found an encoder without weights, expected some: they say its rows' type")


def _runs_of(batch: CheckedBatch, encoder: Any) -> dict[int, list[int | RowGrid]]:
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


def _packs_of(items: ItemPlan, rank: int) -> list[list[int]]:
    """Items of each of a rank's calls of the encoder, in their order."""
    mine = np.flatnonzero(items.first_ranks == rank)
    order = np.lexsort((mine, items.turns[mine], items.phases[mine]))
    found: dict[tuple[int, int], list[int]] = {}
    for item in mine[order].tolist():
        found.setdefault((int(items.phases[item]), int(items.turns[item])), []).append(item)
    return list(found.values())

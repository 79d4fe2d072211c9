"""Images and other items among the tokens of a global batch, encoded over all ranks of the job.

A step encodes its items without a graph, each rank those that the plan gives it; their rows go to
the ranks whose tokens they stand for, where they replace embeddings. Behind the step the rows'
gradients go back; each pack is encoded once more, now with a graph, and differentiated. Gradients
stay sums over items, so they are those of one rank that encoded all. A large item may be cut over
several ranks, whose patches attend to those of all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from megatron_hdp.arrays import BoolArray, Int32Array, Int64Array
from megatron_hdp.data.media import Decoded, StoredItem
from megatron_hdp.data.steps import (
    PlanSettings,
    RankMicroBatch,
    Reader,
    TokenSource,
    read_micro_batch,
    shares_of,
)
from megatron_hdp.media import ItemBatch, ItemPlan, evaluate_items, plan_items
from megatron_hdp.media.rows import RowExchange, row_exchange
from megatron_hdp.megatron.media.damaged import agree_on_damages
from megatron_hdp.megatron.media.items import BatchMedia, ItemHolder, MediaEncoder
from megatron_hdp.megatron.model import FIRST_MARK, require_layers, rows_for_marks, turn_by_axes
from megatron_hdp.megatron.options import TrainingArguments
from megatron_hdp.megatron.parallel import RankPlace, compute_device
from megatron_hdp.planner import Plan
from megatron_hdp.runtime.gathering import on_every_rank
from megatron_hdp.runtime.pieces import Members
from megatron_hdp.runtime.timeline import ENCODER, Timeline

Decoder = Callable[[Sequence[int]], list[Decoded]]
"""Of items of a step that are stored pictures; a ValueError says that a file cannot be read."""


class Piece(NamedTuple):
    """What one rank has of a cut item, as ``encode_piece`` takes it."""

    degree: int
    member: int
    gather: Members
    """Those that have something of it: it may have fewer windows than ranks."""


@dataclass(frozen=True)
class EncoderCall:
    """What one rank encodes at a time: whole items, or its piece of one that is cut."""

    items: tuple[int, ...]
    rows: Int64Array
    """The numbers of the rows that it makes, in their order."""
    piece: Piece | None = None
    """Of a cut item."""

    def __str__(self) -> str:
        """Return its items by number."""
        return f"items {', '.join(map(str, self.items))}"


class JobEncoder:
    """An encoder at this rank's place in the job, which all ranks have alike."""

    def __init__(
        self,
        encoder: MediaEncoder,
        arguments: TrainingArguments,
        chunks: Sequence[Any],
        place: RankPlace,
        settings: PlanSettings,
        reader: Reader,
        balance: str,
        timeline: Timeline | None = None,
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
        self.timeline = timeline or Timeline()
        self._reader = replace(reader, reads_tokens=False, reads_mask=False)
        self._rank = dist.get_rank()
        on_every_rank(self._require_model, compute_device())

    @property
    def width(self) -> int:
        """Of a row: all of its levels."""
        return self.levels * self.hidden

    def prepared(
        self, batch: ItemHolder, media: BatchMedia, plan: Plan, source: TokenSource
    ) -> StepMedia:
        """What this rank does with a batch's items; communicates nothing, and reads no token."""
        place = self.place
        wanted: list[Int64Array] = [np.zeros(0, dtype=np.int64)] * dist.get_world_size()
        first_slots = np.zeros(media.num_rows, dtype=np.int32)
        readers = np.zeros(media.num_rows, dtype=np.int32)
        shares = shares_of(self._settings, batch.step(), plan)
        for share in shares.of(range(place.num_hdp_ranks)):
            reader = replace(self._reader, hdp_rank=share.hdp_rank)
            found: list[list[Int64Array]] = [[] for _ in range(place.num_tensor_ranks)]
            for slot in range(share.num_slots):
                micro_batch = read_micro_batch(share, slot, reader, source)
                rows = media.rows_in(batch, micro_batch)
                first_slots[rows[rows >= 0]] = slot
                for tensor_rank, of_rank in enumerate(found):
                    of_rank.append(rows[self.is_of(tensor_rank, micro_batch) & (rows >= 0)])
            for tensor_rank, of_rank in enumerate(found):
                rank = self._rank_at(share.hdp_rank, tensor_rank)
                wanted[rank] = np.concatenate([*of_rank, np.zeros(0, dtype=np.int64)])
                readers[wanted[rank]] = rank
        planned = self._planned(media, readers, first_slots)
        makers, calls = self._makers(media, planned[1])
        made = np.concatenate([*(one.rows for one in calls), np.zeros(0, dtype=np.int64)])
        exchange = row_exchange(self._rank, wanted, makers, made)
        return StepMedia(self, batch, media, calls, wanted[self._rank], exchange, planned)

    def _makers(self, media: BatchMedia, items: ItemPlan) -> tuple[Int32Array, list[EncoderCall]]:
        """Who makes each row, and the calls of this rank."""
        encoder: Any = self.encoder  # of pieces, where items are cut
        makers = np.repeat(items.first_ranks, media.counts)
        calls = []
        for item in np.flatnonzero(items.is_cut).tolist():
            first, degree = int(items.first_ranks[item]), int(items.degrees[item])
            pieces = encoder.rows_of_pieces(media.items[item], degree)
            rows = {first + i: media.firsts[item] + one for i, one in enumerate(pieces) if len(one)}
            for rank, of_rank in rows.items():
                makers[of_rank] = rank
            if self._rank in rows:
                sizes = [encoder.patches_per_row * len(one) for one in rows.values()]
                members = Members(list(rows), list(rows).index(self._rank), sizes)
                piece = Piece(degree, self._rank - first, members)
                calls.append((item, EncoderCall((item,), rows[self._rank], piece)))
        calls.sort(key=lambda one: (items.phases[one[0]], items.turns[one[0]]))
        return makers, [one for _, one in calls] + _packs_of(media, items, self._rank)

    def _planned(
        self, media: BatchMedia, readers: Int32Array, slots: Int32Array
    ) -> tuple[ItemBatch, ItemPlan]:
        """The step's items, and who encodes what."""
        per_row, num_ranks = self.encoder.patches_per_row, dist.get_world_size()
        patches, most_ranks = media.counts * per_row, getattr(self.encoder, "most_ranks", None)
        batch = ItemBatch(
            patches=patches,
            consumers=readers[media.firsts],
            micro_batches=slots[media.firsts],
            num_ranks=num_ranks,
            ranks_per_node=min(num_ranks, int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))),
            patches_per_row=per_row,
            patches_per_pack=max(self.encoder.patches_per_pack, int(patches.max(initial=0))),
            most_ranks=1 if most_ranks is None else most_ranks(media.items),
        )
        found = plan_items(batch, self.encoder.cost, self.balance)
        return batch, found

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


@dataclass(eq=False)
class StepMedia:
    """What one rank does with the items of one step.

    Attributes:
        damaged: why sequences carry no loss in it, by their place; once ranks have agreed on it.
    """

    job: JobEncoder
    batch: ItemHolder
    media: BatchMedia
    calls: list[EncoderCall]
    """Of the encoder on this rank, in their order."""
    wanted: Int64Array
    """Rows of this rank's tokens, in their order."""
    exchange: RowExchange
    planned: tuple[ItemBatch, ItemPlan]
    """The step's items, and who encodes what."""
    damaged: dict[int, str] = field(default_factory=dict)
    _unreadable: ValueError | None = None
    _made: torch.Tensor | None = None
    _levels: Sequence[torch.Tensor] = ()

    @property
    def patches(self) -> Int64Array:
        """Of each item of the step, ``[items]``."""
        return self.media.counts * self.job.encoder.patches_per_row

    @cached_property
    def efficiency(self) -> float:
        """Work of all items / ranks / that of the busiest one, as planned."""
        return evaluate_items(*self.planned, self.job.encoder.cost).efficiency

    @property
    def num_made(self) -> int:
        """Rows that this rank makes."""
        return sum(len(one.rows) for one in self.calls)

    def decode(self, by: Decoder) -> None:
        """Decodes the stored pictures that this rank encodes; communicates nothing.

        What goes wrong is told by `agree_on_damages`.
        """
        wanted = [item for item, picture in self._stored().items() if picture.found is None]
        try:
            found = by(wanted) if wanted else []
        except ValueError as error:
            self._unreadable = error
            return
        for item, one in zip(wanted, found, strict=True):
            self.batch.media[item].data.found = one

    def agree_on_damages(self, most_damaged: int) -> None:
        """Leaves sequences with damaged pictures out; see `damaged.agree_on_damages`."""
        self.damaged = agree_on_damages(self.batch, self._damages_here, most_damaged)

    def _stored(self) -> dict[int, StoredItem]:
        """Those that this rank encodes, by item."""
        mine = {item: self.batch.media[item].data for call in self.calls for item in call.items}
        return {item: one for item, one in mine.items() if isinstance(one, StoredItem)}

    def _damages_here(self) -> dict[int, str]:
        if self._unreadable is not None:
            raise self._unreadable
        found = {item: one.found for item, one in self._stored().items()}
        return {item: why for item, why in found.items() if isinstance(why, str)}

    @contextmanager
    def rows_in_place(
        self, micro_batches: Sequence[RankMicroBatch], *, learns: bool
    ) -> Iterator[tuple[RankMicroBatch, ...]]:
        """Within it embeddings of items' tokens are their rows, with gradients if it `learns`.

        Yields the micro-batches that are to run.

        Every rank must enter it, with micro-batches that have just been read.

        Raises:
            EveryRankError: the encoder raised a ValueError on some rank.
        """
        self._made = on_every_rank(self._encoded, compute_device())
        rows = self._sent(self._made, self.exchange.send, self.exchange.receive, is_back=False)
        levels = [one.contiguous().requires_grad_(learns) for one in self._levels_of(rows)]
        del rows  # of several levels a copy
        self._levels = levels
        placed = tuple(self.media.with_positions(one) for one in micro_batches)
        if not self.job.place.is_first_stage:
            yield placed
            return
        for one in placed:
            self._mark(one)
        sharded = self.job.place if self.job.is_sharded else None
        with rows_for_marks(self.job.chunks[0], levels, sharded):
            yield placed

    def differentiate(self) -> None:
        """Sends gradients of rows back, and leaves in the encoder's weights those of its items.

        Every rank must call this, once what ran within `rows_in_place` has gone backward. A weight
        without any gets none.

        Raises:
            EveryRankError: some rank's encoder made other rows on its second run.
        """
        found = [torch.zeros_like(one) if one.grad is None else one.grad for one in self._levels]
        gradient = torch.cat(found, dim=1)
        if not self.job.is_sharded and self.job.place.tensor_rank > 0:
            gradient = torch.zeros_like(gradient)  # the same as the first tensor rank's
        of_made = self._sent(gradient, self.exchange.receive, self.exchange.send, is_back=True)
        on_every_rank(lambda: self._encode_again(of_made), compute_device())
        self._made, self._levels = None, ()

    def _levels_of(self, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        found: Sequence[torch.Tensor] = rows.split(self.job.hidden, dim=1)
        return found

    def _encoded(self) -> torch.Tensor:
        with torch.no_grad(), self.job.timeline.span(ENCODER):
            found = [self._called(call) for call in self.calls]
        if found:
            return torch.cat(found)
        return torch.zeros(0, self.job.width, dtype=self.job.dtype, device=compute_device())

    def _called(self, call: EncoderCall) -> torch.Tensor:
        encoder: Any = self.job.encoder
        items = [self.media.items[item] for item in call.items]
        rows = encoder(items) if call.piece is None else encoder.encode_piece(*items, *call.piece)
        expected = (len(call.rows), self.job.width)
        if tuple(rows.shape) != expected or rows.dtype != self.job.dtype:
            raise ValueError(
                f"found rows of shape {tuple(rows.shape)} and {rows.dtype} from the encoder for "
                f"{call}, expected {expected} and {self.job.dtype}, "
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
        num = self.num_made if is_back else len(self.wanted)
        found = rows.new_zeros(num, rows.shape[1])
        return found.index_add_(0, torch.from_numpy(arrive).to(rows.device), coming)

    def _mark(self, micro_batch: RankMicroBatch) -> None:
        """Writes the places of rows among `wanted` into the tokens that they stand for."""
        rows = self.media.rows_in(self.batch, micro_batch)
        has_row = rows >= 0
        is_here = self.job.is_of(self.job.place.tensor_rank, micro_batch) & has_row
        place = np.zeros(max(self.media.num_rows, 1), dtype=np.int64)
        place[self.wanted] = np.arange(len(self.wanted))
        micro_batch.tokens[has_row] = FIRST_MARK
        micro_batch.tokens[is_here] += place[rows[is_here]]

    def _encode_again(self, gradient: torch.Tensor) -> None:
        """Encodes pack by pack once more, and goes backward."""
        assert self._made is not None, "rows were in place"
        for weight in self.job.encoder.parameters():
            weight.grad = None
        first = 0
        for call in self.calls:
            here = slice(first, first := first + len(call.rows))
            with self.job.timeline.span(ENCODER):
                with torch.enable_grad():
                    rows = self._called(call)
                if not torch.equal(rows.detach(), self._made[here]):
                    raise ValueError(
                        f"found other rows of {call} on the encoder's "
                        "second run than on its first, expected the same bits: it may draw nothing "
                        "(dropout) and keep nothing between calls"
                    )
                rows.backward(gradient[here])


def _dtype_of(encoder: MediaEncoder) -> torch.dtype:
    """Of its rows, which ranks without items receive as well."""
    for weight in encoder.parameters():
        return weight.dtype
    raise ValueError("found an encoder without weights, expected some: they say its rows' type")


def _packs_of(media: BatchMedia, items: ItemPlan, rank: int) -> list[EncoderCall]:
    """A rank's calls for whole items, in their order."""
    mine = np.flatnonzero((items.first_ranks == rank) & ~items.is_cut)
    order = np.lexsort((mine, items.turns[mine], items.phases[mine]))
    found: dict[tuple[int, int], list[int]] = {}
    for item in mine[order].tolist():
        found.setdefault((int(items.phases[item]), int(items.turns[item])), []).append(item)
    return [
        EncoderCall(tuple(pack), np.concatenate([media.rows_of(item) for item in pack]))
        for pack in found.values()
    ]

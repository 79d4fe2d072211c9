"""Images and other items among the tokens of a global batch, encoded over all ranks of the job.

A step encodes its items without a graph, each rank those that the plan gives it; their rows go to
the ranks whose tokens they stand for, where they replace embeddings. Behind the step the rows'
gradients go back; each pack is encoded once more, now with a graph, and differentiated. Gradients
stay sums over items, so they are those of one rank that encoded all. A large item may be cut over
several ranks, whose patches attend to those of all of them.

Rows may travel in several waves, by the micro-batches that they are for: the first pipeline stage,
whose ranks then encode less, computes while others still encode; see `row_store`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

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
from megatron_hdp.media import (
    ItemBatch,
    ItemCostModel,
    ItemPlan,
    evaluate_items,
    gap_choices,
    plan_in_gaps,
    plan_items,
)
from megatron_hdp.media.rows import RowExchange, row_exchange
from megatron_hdp.media.waves import even_starts, fitting_starts, waves_of
from megatron_hdp.megatron.media.calls import EncoderCall, calls_of, makers_of, pieces_of
from megatron_hdp.megatron.media.damaged import agree_on_damages
from megatron_hdp.megatron.media.items import BatchMedia, ItemHolder, MediaEncoder
from megatron_hdp.megatron.media.row_store import RowStore
from megatron_hdp.megatron.model import FIRST_MARK, require_layers, rows_for_marks, turn_by_axes
from megatron_hdp.megatron.options import TrainingArguments
from megatron_hdp.megatron.parallel import RankPlace, compute_device, rows_group
from megatron_hdp.planner import Plan
from megatron_hdp.planner.lockstep import stands_in_place
from megatron_hdp.runtime.gathering import on_every_rank, outcome_of
from megatron_hdp.runtime.health import fingerprint, require_agreement
from megatron_hdp.runtime.timeline import ENCODER, Timeline

_NO_ROWS = np.zeros(0, dtype=np.int64)
Decoder = Callable[[Sequence[int]], list[Decoded]]
"""Of items of a step that are stored pictures; a ValueError says that a file cannot be read."""


@dataclass(frozen=True)
class Encoding:
    """How the items of a job are encoded; the fields are what flags say."""

    balance: str = "step"
    waves: int | None = None
    """Exchanges of a step; None: as many as fill the gaps of its pipelines."""
    most_rows: int | None = None
    """That a rank holds on its device; in a step of more they are parked in host memory."""

    @property
    def has_gaps(self) -> bool:
        """Whether ranks of pipelines encode where they would wait: they make unequal rows."""
        return self.waves is None and self.most_rows is None


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
        how: Encoding,
        timeline: Timeline | None = None,
    ) -> None:
        """Every rank of the job must call this.

        Raises:
            ValueError: ranks of the job lie in another order than Megatron's, or the model has no
                layers or no frequencies for the encoder's rows.
        """
        self.encoder, self.place, self.chunks = encoder, place, chunks
        self.is_sharded, self.hidden = arguments.sequence_parallel, arguments.hidden_size
        self.how, self._settings = how, settings
        self.dtype = _dtype_of(encoder)
        self.levels: int = getattr(encoder, "levels", 1)
        self.timeline = timeline or Timeline()
        self._reader = replace(reader, reads_tokens=False, reads_mask=False)
        self._rank = dist.get_rank()
        self.group = partial(rows_group, arguments)
        self.group()
        on_every_rank(self._require_model, compute_device())

    @property
    def width(self) -> int:
        """Of a row: all of its levels."""
        return self.levels * self.hidden

    def prepared(
        self,
        batch: ItemHolder,
        media: BatchMedia,
        plan: Plan,
        source: TokenSource,
        cost: ItemCostModel | None = None,
    ) -> StepMedia:
        """What this rank does with a batch's items; communicates nothing, and reads no token.

        They are planned by the encoder's own cost, or by this one.
        """
        cost = cost or self.encoder.cost
        wanted, readers, slots, num_slots = self._wanted(batch, media, plan, source)
        one_wave = self._items(media, readers, slots)
        is_parked = False
        if self._knows_gaps(plan):
            planned = self._planned_in_gaps(one_wave, plan, cost)
        else:
            starts = even_starts(num_slots, self.how.waves or 1)
            if (most := self.how.most_rows) is not None:
                rows_of = self._rows_of_waves(media, one_wave, wanted, num_slots, cost)
                if is_parked := rows_of(0, num_slots) > most:
                    starts = fitting_starts(starts, num_slots, rows_of, most)
            waves = waves_of(slots, starts) if len(starts) > 1 else None
            in_waves = replace(one_wave, waves=waves)
            planned = in_waves, self._plan(in_waves, cost)
        of_item = np.zeros_like(slots) if planned[0].waves is None else planned[0].waves
        of_row = np.repeat(of_item, media.counts)
        pieces = pieces_of(media, planned[1], self.encoder)
        makers = makers_of(media, planned[1], pieces)
        calls = calls_of(media, planned[1], pieces, self.encoder, of_item, self._rank)
        exchanges = []
        for wave in range(int(of_item.max(initial=0)) + 1):
            made = [_NO_ROWS, *(one.rows for one in calls if one.wave == wave)]
            here = [rows[of_row[rows] == wave] for rows in wanted]
            exchanges.append(row_exchange(self._rank, here, makers, np.concatenate(made)))
        return StepMedia(self, batch, media, calls, exchanges, planned, cost, is_parked)

    def _wanted(
        self, batch: ItemHolder, media: BatchMedia, plan: Plan, source: TokenSource
    ) -> tuple[list[Int64Array], Int32Array, Int32Array, int]:
        """The rows that each rank of the job wants, in the order of its tokens.

        Also of each item a rank that wants its first row, and the first slot that holds some of it,
        as members of a ring may have it in other ones; and how many slots the longest rank has.
        """
        place = self.place
        wanted: list[Int64Array] = [_NO_ROWS] * dist.get_world_size()
        shares = [*shares_of(self._settings, batch.step(), plan).of(range(place.num_hdp_ranks))]
        num_slots = max(share.num_slots for share in shares)
        slots = np.full(media.num_rows, num_slots - 1, dtype=np.int32)
        readers = np.zeros(media.num_rows, dtype=np.int32)
        for share in shares:
            reader = replace(self._reader, hdp_rank=share.hdp_rank)
            found: list[list[Int64Array]] = [[_NO_ROWS] for _ in range(place.num_tensor_ranks)]
            for slot in range(share.num_slots):
                micro_batch = read_micro_batch(share, slot, reader, source)
                rows = media.rows_in(batch, micro_batch)
                slots[rows[rows >= 0]] = slot
                for tensor_rank, of_rank in enumerate(found):
                    of_rank.append(rows[self.is_of(tensor_rank, micro_batch) & (rows >= 0)])
            for tensor_rank, of_rank in enumerate(found):
                rank = self._rank_at(share.hdp_rank, tensor_rank)
                wanted[rank] = np.concatenate(of_rank)
                readers[wanted[rank]] = rank
        first = np.minimum.reduceat(slots, media.firsts)
        return wanted, readers[media.firsts], first, num_slots

    def _rows_of_waves(
        self,
        media: BatchMedia,
        items: ItemBatch,
        wanted: Sequence[Int64Array],
        num_slots: int,
        cost: ItemCostModel,
    ) -> Callable[[int, int], int]:
        """What tells how many rows a wave of slots has on the rank that wants or makes most."""
        slots = items.micro_batches
        of_row = np.repeat(slots, media.counts)
        want = np.array([np.bincount(of_row[rows], minlength=num_slots) for rows in wanted])

        def rows_of(begin: int, end: int) -> int:
            here = np.flatnonzero((slots >= begin) & (slots < end))
            if not len(here):
                return 0
            some, plan = media.only(here), self._plan(items.of_wave(here), cost)
            made = np.bincount(makers_of(some, plan, pieces_of(some, plan, self.encoder)))
            return int(max(want[:, begin:end].sum(axis=1).max(), made.max()))

        return rows_of

    def _items(self, media: BatchMedia, readers: Int32Array, slots: Int32Array) -> ItemBatch:
        """The step's items, in one wave."""
        per_row, num_ranks = self.encoder.patches_per_row, dist.get_world_size()
        patches, most_ranks = media.counts * per_row, getattr(self.encoder, "most_ranks", None)
        return ItemBatch(
            patches=patches,
            consumers=readers,
            micro_batches=slots,
            num_ranks=num_ranks,
            ranks_per_node=min(num_ranks, int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))),
            patches_per_row=per_row,
            patches_per_pack=max(self.encoder.patches_per_pack, int(patches.max(initial=0))),
            most_ranks=1 if most_ranks is None else most_ranks(media.items),
        )

    def _knows_gaps(self, plan: Plan) -> bool:
        """Whether it is known when ranks wait: not of plans that are run with padding."""
        if not self.how.has_gaps or self.place.num_stages == 1:
            return False
        return self._settings.lockstep_ranks > 1 or stands_in_place(plan)

    def _planned_in_gaps(
        self, items: ItemBatch, plan: Plan, cost: ItemCostModel
    ) -> tuple[ItemBatch, ItemPlan]:
        """The items in waves, and who encodes what; ranks that wait in this plan encode more."""
        choices = gap_choices(
            plan,
            self._settings.times_of(plan),
            items.micro_batches,
            tensor_ranks=self.place.num_tensor_ranks,
            lockstep_ranks=self._settings.lockstep_ranks,
        )
        return plan_in_gaps(items, cost, choices, self.how.balance)

    def _plan(self, items: ItemBatch, cost: ItemCostModel) -> ItemPlan:
        """Who encodes what; waves are planned one by one, so a wave is what it is alone."""
        return plan_items(items, cost, self.how.balance)

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
    exchanges: list[RowExchange]
    """Of each wave."""
    planned: tuple[ItemBatch, ItemPlan]
    """The step's items, and who encodes what."""
    cost: ItemCostModel
    """By which they were planned."""
    is_parked: bool = False
    """Whether rows wait in host memory."""
    damaged: dict[int, str] = field(default_factory=dict)
    _unreadable: ValueError | None = None
    _store: RowStore | None = None
    _made: list[torch.Tensor] = field(default_factory=list)
    _mistake: str | None = None
    """Of the encoder on this rank, the first one."""

    @property
    def patches(self) -> Int64Array:
        """Of each item of the step, ``[items]``."""
        return self.media.counts * self.job.encoder.patches_per_row

    @cached_property
    def efficiency(self) -> float:
        """Work of all items / ranks / that of the busiest one, as planned."""
        return evaluate_items(*self.planned, self.cost).efficiency

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

    def with_text_behind(
        self, micro_batches: Sequence[RankMicroBatch]
    ) -> tuple[RankMicroBatch, ...]:
        """The micro-batches as of `BatchMedia.with_text_behind`."""
        return tuple(self.media.with_text_behind(self.batch, one) for one in micro_batches)

    def agree_on_damages(self, most_damaged: int) -> None:
        """Leaves sequences with damaged pictures out; see `damaged.agree_on_damages`.

        Raises:
            DisagreementError: ranks have planned differently who encodes what.
        """
        batch, made = self.planned
        columns = (made.first_ranks, made.degrees, made.turns, made.phases, batch.waves)
        fact = fingerprint(*(None if one is None else one.tobytes() for one in columns))
        require_agreement({"who encodes which items": fact}, compute_device())
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
        job, device = self.job, compute_device()
        self._store = store = RowStore(
            self.exchanges,
            job.group(),
            torch.empty(0, job.width, dtype=job.dtype, device=device),
            job.levels,
            job.timeline,
            learns=learns,
            is_counted=job.is_sharded or job.place.tensor_rank == 0,
            is_parked=self.is_parked,
        )
        self._made, self._mistake = [], None
        for wave in range(len(self.exchanges)):
            made = self._encoded(wave)
            if wave == 0:  # without it no rank computes anything
                on_every_rank(self._require_no_mistake, device)
            store.send(made)
            self._made.append(made.cpu() if self.is_parked else made)
        placed = tuple(self.media.with_positions(one) for one in micro_batches)
        if job.place.is_first_stage:
            for one in placed:
                self._mark(one)
            with rows_for_marks(job.chunks[0], store, job.place if job.is_sharded else None):
                yield placed
        else:
            yield placed
        store.finish()
        if not learns and len(self.exchanges) > 1:
            on_every_rank(self._require_no_mistake, device)

    def differentiate(self) -> None:
        """Sends gradients of rows back, and leaves in the encoder's weights those of its items.

        Every rank must call this, once what ran within `rows_in_place` has gone backward. A weight
        without any gets none.

        Raises:
            EveryRankError: some rank's encoder raised a ValueError, or made other rows on its
                second run.
        """
        assert self._store is not None, "rows were in place"
        for weight in self.job.encoder.parameters():
            weight.grad = None
        for wave, made in enumerate(self._made):
            self._encode_again(wave, made, self._store.returned(wave, len(made)))
        on_every_rank(self._require_no_mistake, compute_device())
        self._store, self._made = None, []

    def _require_no_mistake(self) -> None:
        if self._mistake is not None:
            raise ValueError(self._mistake)

    def _tried(self, call: EncoderCall) -> torch.Tensor | None:
        """Its rows; None, and its mistake is known, if the encoder raises a ValueError.

        The calls behind it run: other ranks may be in them together with this one. Those that share
        its item wait for this one already, so there the mistake ends this rank, and they hear why.
        """
        if call.piece is not None:
            return self._called(call)
        found, mistake = outcome_of(partial(self._called, call))
        self._mistake = self._mistake or mistake
        return found

    def _encoded(self, wave: int) -> torch.Tensor:
        """The rows that this rank makes in a wave; zeros where the encoder raised a ValueError."""
        found = [torch.zeros(0, self.job.width, dtype=self.job.dtype, device=compute_device())]
        with torch.no_grad(), self.job.timeline.span(ENCODER):
            for call in self._calls_of(wave):
                rows = self._tried(call)
                found.append(
                    found[0].new_zeros(len(call.rows), self.job.width) if rows is None else rows
                )
        return torch.cat(found)

    def _calls_of(self, wave: int) -> list[EncoderCall]:
        return [one for one in self.calls if one.wave == wave]

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

    def _mark(self, micro_batch: RankMicroBatch) -> None:
        """Writes the places of rows in the store into the tokens that they stand for."""
        rows = self.media.rows_in(self.batch, micro_batch)
        has_row = rows >= 0
        is_here = self.job.is_of(self.job.place.tensor_rank, micro_batch) & has_row
        micro_batch.tokens[has_row] = FIRST_MARK
        micro_batch.tokens[is_here] += self._place_of_row[rows[is_here]]

    @cached_property
    def _place_of_row(self) -> Int64Array:
        """Of rows that this rank wants the place in the store, of others 0, ``[rows]``."""
        found = np.zeros(max(self.media.num_rows, 1), dtype=np.int64)
        coming = np.concatenate([one.receive for one in self.exchanges])
        found[coming] = np.arange(len(coming))
        return found

    def _encode_again(self, wave: int, made: torch.Tensor, gradient: torch.Tensor) -> None:
        """Encodes the packs of a wave once more, one by one, and goes backward."""
        first = 0
        for call in self._calls_of(wave):
            here = slice(first, first := first + len(call.rows))
            with self.job.timeline.span(ENCODER):
                with torch.enable_grad():
                    rows = self._tried(call)
                if rows is None:
                    continue
                if not torch.equal(rows.detach(), made[here].to(rows.device)):
                    self._mistake = self._mistake or (
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

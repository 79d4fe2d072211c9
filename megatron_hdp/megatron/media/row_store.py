"""Rows of a step's items on their way, wave by wave, and their gradients on the way back.

Why no two ranks wait for each other: exchanges are collectives of all ranks, on a communicator that
nothing else uses. Each rank begins them in one order: rows of all waves before its first forward,
then gradients of all waves. What it waits for is one of these alone, never another's schedule:

- Rows of a wave are there once all ranks have encoded it. Before its schedule a rank waits for
  nothing but members of its cut items. These come in one order on all ranks (waves, then turns), so
  of those that are not done the first has all its members there or on the way.
- Gradients of a wave are there once all ranks have begun their exchange. A rank of the first stage
  does so in its backward, which waits for no gradients of rows; everybody else, and whatever is
  left, once the own schedule is over and all that other stages want of this rank has been sent.
  Only behind that a rank waits for gradients, and encodes again, cut items in the same order.

Where rows are parked in host memory, a rank waits for each exchange as soon as it has begun it, and
begins none in its backward. Then all ranks are in the same exchange, or on the way to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_hdp.arrays import Int64Array
from megatron_hdp.media.rows import RowExchange
from megatron_hdp.runtime.host_to_device import to_device
from megatron_hdp.runtime.timeline import ROW_GRADIENTS_WAIT, ROWS_WAIT, Timeline


@dataclass(frozen=True)
class _UnderWay:
    """An exchange that has begun; dropped when it has ended, as the handle keeps both tensors."""

    work: dist.Work
    coming: torch.Tensor
    leaving: torch.Tensor


class RowStore:
    """The rows that a rank wants in one step, by places in the order in which they come.

    Those of wave w are behind those of earlier waves. It is what `rows_for_marks` takes rows from.

    Args:
        exchanges: of each wave.
        group: of all ranks, for these exchanges alone.
        like: an empty tensor ``[0, levels * hidden]`` that rows are like.
        levels: of a row.
        timeline: notes what is waited for.
        learns: whether gradients go back.
        is_counted: whether this rank's gradients are; else those of another tensor rank, the same.
        is_parked: whether rows and gradients are in host memory but for those of one wave.
    """

    def __init__(
        self,
        exchanges: Sequence[RowExchange],
        group: dist.ProcessGroup,
        like: torch.Tensor,
        levels: int,
        timeline: Timeline,
        *,
        learns: bool,
        is_counted: bool = True,
        is_parked: bool = False,
    ) -> None:
        self.levels = levels
        self._exchanges, self._group, self._timeline = exchanges, group, timeline
        counts = np.array([len(one.receive) for one in exchanges], dtype=np.int64)
        self._ends = np.cumsum(counts)
        self._like, self._is_parked, self._is_counted = like, is_parked, is_counted
        total = int(counts.sum())
        held = self._on_host if is_parked else self._on_device
        self._rows, self._gradients = held(total), held(total).zero_() if learns else None
        self._anchor = torch.zeros(1, device=like.device, requires_grad=learns)
        self._missing = counts * levels
        """Of each wave, gradients that have not come."""
        self._num_sent = self._num_here = self._num_returned = 0
        self._under_way: dict[tuple[str, int], _UnderWay] = {}
        """By kind, rows or gradients, and wave."""

    def send(self, made: torch.Tensor) -> None:
        """Begins to send the rows of the next wave that this rank makes, ``[made, width]``."""
        wave, self._num_sent = self._num_sent, self._num_sent + 1
        one, here = self._exchanges[wave], self._rows[self._places_of(wave)]
        leaving = made.detach()[_indices(one.send, made)]
        coming = self._on_device(len(here)) if self._is_parked else here
        sizes = one.receive_counts, one.send_counts
        self._begin((ROWS_WAIT, wave), coming, leaving, *sizes)
        if self._is_parked:
            self._wait_for(wave)

    def take(self, places: Int64Array, level: int) -> torch.Tensor:
        """A level of the rows at places, ``[places, hidden]``, once their waves are there.

        Their gradient is added up here; when those of a wave are complete, they leave.
        """
        self._wait_for(int(self._waves_of(places).max()))
        found: torch.Tensor = _Taken.apply(self._anchor, self, places, level)
        return found

    def returned(self, wave: int, num_made: int) -> torch.Tensor:
        """The gradients of the rows that this rank made in a wave, ``[made, width]``.

        Sums, as a row may have gone to several ranks. What ran has gone backward; rows that got no
        gradient have zeros.
        """
        while self._num_returned < (wave + 1 if self._is_parked else len(self._exchanges)):
            self._return_next()
        coming = self._come((ROW_GRADIENTS_WAIT, wave))
        found = coming.new_zeros(num_made, coming.shape[1])
        return found.index_add_(0, _indices(self._exchanges[wave].send, found), coming)

    def finish(self) -> None:
        """Waits for the rows of all waves: this rank may have wanted none of the last ones."""
        self._wait_for(self._num_sent - 1)

    def rows_at(self, places: Int64Array, level: int) -> torch.Tensor:
        """Those that are there, without a graph."""
        found = self._level(self._rows, level)[_indices(places, self._rows)]
        return to_device(found, self._like.device) if self._is_parked else found

    def add(self, places: Int64Array, level: int, gradient: torch.Tensor) -> None:
        """Adds gradients of rows, and begins to send those of waves that are complete."""
        assert self._gradients is not None, "rows have gradients in a step that learns"
        counts = np.bincount(self._waves_of(places), minlength=len(self._ends))
        assert not counts[: self._num_returned].any(), "gradients of rows came after they left"
        if self._is_counted:
            there = _indices(places, self._gradients)
            of_level = self._level(self._gradients, level)
            of_level.index_add_(0, there, gradient.to(of_level.device))
        self._missing -= counts
        if self._is_parked:
            return
        while self._num_returned < len(self._ends) and not self._missing[self._num_returned]:
            self._return_next()

    def _return_next(self) -> None:
        """Begins to send the gradients of the next wave."""
        assert self._gradients is not None, "rows have gradients in a step that learns"
        wave, self._num_returned = self._num_returned, self._num_returned + 1
        one, leaving = self._exchanges[wave], self._gradients[self._places_of(wave)]
        if self._is_parked:
            leaving = self._on_device(len(leaving)).copy_(leaving)
        coming = self._on_device(len(one.send))
        sizes = one.send_counts, one.receive_counts
        self._begin((ROW_GRADIENTS_WAIT, wave), coming, leaving, *sizes)

    def _begin(
        self,
        which: tuple[str, int],
        coming: torch.Tensor,
        leaving: torch.Tensor,
        come: list[int],
        leave: list[int],
    ) -> None:
        how = {"group": self._group, "async_op": True}
        work = dist.all_to_all_single(coming, leaving, come, leave, **how)
        assert work is not None, "this rank is of the group"
        self._under_way[which] = _UnderWay(work, coming, leaving)

    def _come(self, which: tuple[str, int]) -> torch.Tensor:
        """What has come with an exchange."""
        one = self._under_way.pop(which)
        with self._timeline.span(which[0]):
            one.work.wait()
        return one.coming

    def _wait_for(self, wave: int) -> None:
        while self._num_here <= wave:
            coming = self._come((ROWS_WAIT, self._num_here))
            if self._is_parked:
                self._rows[self._places_of(self._num_here)].copy_(coming)
            self._num_here += 1

    def _on_device(self, num: int) -> torch.Tensor:
        return self._like.new_empty(num, self._like.shape[1])

    def _on_host(self, num: int) -> torch.Tensor:
        like = self._like
        is_pinned = like.device.type == "cuda"
        return torch.empty(num, like.shape[1], dtype=like.dtype, pin_memory=is_pinned)

    def _waves_of(self, places: Int64Array) -> Int64Array:
        return np.searchsorted(self._ends, places, side="right")

    def _places_of(self, wave: int) -> slice:
        return slice(int(self._ends[wave - 1]) if wave else 0, int(self._ends[wave]))

    def _level(self, rows: torch.Tensor, level: int) -> torch.Tensor:
        hidden = rows.shape[1] // self.levels
        return rows[:, level * hidden : (level + 1) * hidden]


class _Taken(torch.autograd.Function):
    """Rows of a store; what runs once more, with a graph, takes them once more.

    Backward comes once a row: what ran before without a graph has none.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, store: RowStore, places: Int64Array, level: int
    ) -> torch.Tensor:
        ctx.where = store, places, level
        return store.rows_at(places, level)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, None, None]:
        store, places, level = ctx.where
        store.add(places, level, *gradients)
        return None, None, None, None


def _indices(places: Int64Array, like: torch.Tensor) -> torch.Tensor:
    return to_device(torch.from_numpy(places), like.device)

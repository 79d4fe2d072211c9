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


@dataclass
class _UnderWay:
    """An exchange that has begun."""

    work: dist.Work
    coming: torch.Tensor
    leaving: torch.Tensor
    """Kept until it has left."""


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
    ) -> None:
        self.levels = levels
        self._exchanges, self._group, self._timeline = exchanges, group, timeline
        counts = np.array([len(one.receive) for one in exchanges], dtype=np.int64)
        self._ends = np.cumsum(counts)
        self._rows = like.new_empty(int(counts.sum()), like.shape[1])
        self._gradients = torch.zeros_like(self._rows) if learns else None
        self._is_counted = is_counted
        self._anchor = torch.zeros(1, device=like.device, requires_grad=learns)
        self._missing = counts * levels
        """Of each wave, gradients that have not come."""
        self._sent: list[_UnderWay] = []
        self._num_here = 0
        self._returned: list[_UnderWay] = []

    def send(self, made: torch.Tensor) -> None:
        """Begins to send the rows of the next wave that this rank makes, ``[made, width]``."""
        one = self._exchanges[len(self._sent)]
        leaving = made.detach()[_indices(one.send, made)]
        coming = self._rows[self._places_of(len(self._sent))]
        sizes = one.receive_counts, one.send_counts
        self._sent.append(self._begun(coming, leaving, *sizes))

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
        while len(self._returned) < len(self._exchanges):
            self._return_next()
        one = self._returned[wave]
        with self._timeline.span(ROW_GRADIENTS_WAIT):
            one.work.wait()
        found = one.coming.new_zeros(num_made, one.coming.shape[1])
        return found.index_add_(0, _indices(self._exchanges[wave].send, found), one.coming)

    def finish(self) -> None:
        """Waits for the rows of all waves: this rank may have wanted none of the last ones."""
        self._wait_for(len(self._sent) - 1)

    def rows_at(self, places: Int64Array, level: int) -> torch.Tensor:
        """Those that are there, without a graph."""
        return self._level(self._rows, level)[_indices(places, self._rows)]

    def add(self, places: Int64Array, level: int, gradient: torch.Tensor) -> None:
        """Adds gradients of rows, and begins to send those of waves that are complete."""
        assert self._gradients is not None, "rows have gradients in a step that learns"
        counts = np.bincount(self._waves_of(places), minlength=len(self._ends))
        assert not counts[: len(self._returned)].any(), "gradients of rows came after they left"
        if self._is_counted:
            there = _indices(places, gradient)
            self._level(self._gradients, level).index_add_(0, there, gradient)
        self._missing -= counts
        while len(self._returned) < len(self._ends) and not self._missing[len(self._returned)]:
            self._return_next()

    def _return_next(self) -> None:
        """Begins to send the gradients of the next wave."""
        assert self._gradients is not None, "rows have gradients in a step that learns"
        wave = len(self._returned)
        one, leaving = self._exchanges[wave], self._gradients[self._places_of(wave)]
        coming = leaving.new_empty(len(one.send), leaving.shape[1])
        sizes = one.send_counts, one.receive_counts
        self._returned.append(self._begun(coming, leaving, *sizes))

    def _begun(
        self,
        coming: torch.Tensor,
        leaving: torch.Tensor,
        come: list[int],
        leave: list[int],
    ) -> _UnderWay:
        work = dist.all_to_all_single(
            coming, leaving, come, leave, group=self._group, async_op=True
        )
        assert work is not None, "this rank is of the group"
        return _UnderWay(work, coming, leaving)

    def _wait_for(self, wave: int) -> None:
        while self._num_here <= wave:
            with self._timeline.span(ROWS_WAIT):
                self._sent[self._num_here].work.wait()
            self._num_here += 1

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

"""What several ranks have of one item, gathered; gradients go back to whose they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Members:
    """Ranks of the job that share an item, and what each has of it.

    All of them must call it equally often, in one order with what else they share.
    """

    ranks: Sequence[int]
    place: int
    """Of this one among them."""
    sizes: Sequence[int]
    """What each has."""

    def __call__(self, mine: torch.Tensor) -> torch.Tensor:
        """What all have, one behind another along dimension 1, of ``[k, sizes[place], ...]``."""
        found: torch.Tensor = _Gathered.apply(mine, self)
        return found

    def of_all(self, mine: torch.Tensor) -> torch.Tensor:
        """The same, without a gradient."""
        mine = mine.contiguous()
        shape = mine.shape
        found = [mine.new_empty(shape[0], size, *shape[2:]) for size in self.sizes]
        found[self.place] = mine
        self._exchange([mine] * len(self.ranks), found)
        return torch.cat(found, dim=1)

    def returned(self, gradient: torch.Tensor) -> torch.Tensor:
        """The sum of what all members have as gradient of this one's, in the members' order."""
        theirs = [one.contiguous() for one in gradient.split(list(self.sizes), dim=1)]
        found = [torch.empty_like(theirs[self.place]) for _ in self.ranks]
        found[self.place] = theirs[self.place]
        self._exchange(theirs, found)
        return torch.stack(found).sum(dim=0)

    def _exchange(self, leave: Sequence[torch.Tensor], arrive: Sequence[torch.Tensor]) -> None:
        """Sends to, and receives from, each other member."""
        pairs = zip(self.ranks, leave, arrive, strict=True)
        others = [one for place, one in enumerate(pairs) if place != self.place]
        messages = [dist.P2POp(dist.isend, one, rank) for rank, one, _ in others]
        messages += [dist.P2POp(dist.irecv, one, rank) for rank, _, one in others]
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, members: Members) -> torch.Tensor:
        ctx.members = members
        return members.of_all(mine)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = gradients
        return ctx.members.returned(gradient), None

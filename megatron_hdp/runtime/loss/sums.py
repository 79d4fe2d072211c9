"""Losses of tokens added up by group, such as by the source of data that they come from."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LossSums:
    """Where the losses of one micro-batch's tokens go besides the total; nothing flows back."""

    group: torch.Tensor
    """int64 ``[t]``: the group of each token; of one without loss, any."""
    totals: torch.Tensor
    """float64 ``[groups]``: added to in place."""

    def add(self, losses: torch.Tensor) -> None:
        """Add losses of all tokens, ``[t]`` or ``[1, t]``, 0 where none is carried."""
        self.totals.index_add_(0, self.group, losses.detach().flatten().to(self.totals.dtype))

"""A loss of the caller's own, in the place of the cross entropy of the next token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from megatron_hdp.arrays import AnyArray
from megatron_hdp.data.steps import RankMicroBatch
from megatron_hdp.megatron.model import LastStage

Arrays = dict[str, AnyArray]


class OwnLoss(Protocol):
    """What the last stage minimises, micro-batch by micro-batch; its sum is divided once.

    Of one that runs in parts it is asked for each part, which is given as a micro-batch of its own.
    """

    def arrays(self, micro_batch: RankMicroBatch) -> Mapping[str, AnyArray]:
        """What it needs of a micro-batch on the device, of types of at most 8 bytes.

        Names of its own: the micro-batch's tokens, labels, positions, loss mask and sources are
        there already.
        """
        ...

    def of(
        self, micro_batch: RankMicroBatch, tensors: Mapping[str, torch.Tensor], last: LastStage
    ) -> torch.Tensor:
        """The sum of the loss of a micro-batch's tokens on this rank.

        `tensors` are `arrays` on the device, and what the micro-batch brings by itself.

        Returns:
            Scalar of at least float32; equal on tensor-parallel ranks, and depending on the hidden
            states even where nothing of the micro-batch carries loss.
        """
        ...

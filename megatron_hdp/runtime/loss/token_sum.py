"""Token-sum cross entropy over a vocabulary that tensor-parallel ranks may share."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_hdp.runtime.loss.fused_cross_entropy import rank_in
from megatron_hdp.runtime.loss.rows import inside
from megatron_hdp.runtime.loss.sums import LossSums


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Cross entropy in the logits' precision (at least float32), the vocabulary in slices."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, group: dist.ProcessGroup | None
    ) -> torch.Tensor:
        ctx.dtype = logits.dtype
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        size = 1 if group is None else dist.get_world_size(group)
        start = rank_in(group) * logits.shape[-1]
        largest = logits.amax(-1, keepdim=True)
        if size > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        logits -= largest
        column, here = inside((labels - start)[..., None], logits.shape[-1])
        target = logits.gather(-1, column) * here
        probabilities = logits.exp_()
        sums = torch.stack((probabilities.sum(-1, keepdim=True), target))
        if size > 1:
            dist.all_reduce(sums, group=group)
        probabilities /= sums[0]
        ctx.save_for_backward(probabilities, column, here)
        return (sums[0].log() - sums[1]).squeeze(-1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        probabilities, column, here = ctx.saved_tensors
        dlogits = probabilities * grad[..., None]
        dlogits.scatter_add_(-1, column, -grad[..., None] * here)
        return dlogits.to(ctx.dtype), None, None


def token_sum_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    loss_mask: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    sums: LossSums | None = None,
) -> torch.Tensor:
    """Sum of the cross entropies of the tokens that carry loss.

    Args:
        logits: ``[..., V / TP]``, this rank's slice of the vocabulary.
        labels: ``[...]`` token ids.
        loss_mask: ``[...]`` bool, true where the token carries loss.
        group: tensor-parallel group, or None where the vocabulary is whole.
        sums: where losses are added up by group, too.

    Returns:
        Scalar, float32 or (for float64 logits) float64.
    """
    losses = _VocabParallelCrossEntropy.apply(logits, labels, group)
    losses = losses * loss_mask
    if sums is not None:
        sums.add(losses)
    return losses.sum()

"""Log-probabilities of labels straight from hidden states: logits exist only chunk by chunk.

They differ from the fused loss in one thing: what is minimised is not known yet. So nothing but a
number a token is kept, and backward makes each chunk's logits once more, weighed by the gradient
that comes back: a fourth matrix product, whatever is made of the log-probabilities in between.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_hdp.runtime.loss.fused_cross_entropy import (
    add_product,
    chunk_of,
    of_all_parts,
    over_the_vocabulary,
    rank_in,
    rows_for,
)
from megatron_hdp.runtime.loss.rows import inside


def linear_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    logits_bytes: int | None = None,
    main_grad: torch.Tensor | None = None,
    with_entropies: bool = False,
) -> torch.Tensor:
    """Log-probabilities of labels under ``softmax(hidden @ weight.T)``.

    Differentiable by `hidden` and `weight`, once. With a group, all its ranks must make the same of
    the result; each gets the gradient of its own part of the weights, and of the hidden states the
    *part* that comes through it: the caller sums these over the ranks.

    With `main_grad` backward adds the weights' gradient to it. If `weight` wants a gradient, it
    gets the weights themselves in its place, which nobody may read.

    The arguments are those of `linear_cross_entropy`; and `with_entropies`, for which plain PyTorch
    takes three times a chunk's memory.

    Returns:
        ``[n]`` nats, at most 0; float32 or (for float64 weights) float64; equal on all ranks of
        the group. With entropies ``[2, n]``: behind the log-probabilities those of the whole
        distributions, ``-sum(p log p)`` nats, by the same logits.

    Raises:
        ValueError: shapes that do not belong together.
    """
    if labels.shape != (len(hidden),):
        raise ValueError(
            f"found hidden states {tuple(hidden.shape)} and labels {tuple(labels.shape)}; expected "
            "one label a hidden state"
        )
    chunk = chunk_of(hidden, weight, logits_bytes)
    hidden = hidden.to(weight.dtype)
    found: torch.Tensor = _LinearLogProbs.apply(
        hidden, weight, labels, group, chunk, main_grad, with_entropies
    )
    return found if with_entropies else found[0]


def _statistics(logits: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """``[4, c]``: the largest, the sum of exp(logit - largest), the label's, the sum of products.

    The products are those of ``exp(logit - largest)`` and ``logit - largest``.
    """
    column, here = inside(columns, logits.shape[1])
    targets = logits.gather(1, column[:, None])[:, 0] * here
    largest = logits.amax(1)
    below = logits - largest[:, None]
    scores = below.exp()
    return torch.stack((largest, scores.sum(1), targets, scores.mul_(below).sum(1)))


def _combined(figures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log of the sum of exp, label's logit, entropy), ``[c]`` each, of `_statistics` by part."""
    largest, sums, targets, products = figures.unbind(1)
    top = largest.amax(0)
    scale = (largest - top).exp()
    total = (scale * sums).sum(0)
    mean = (scale * (products + sums * (largest - top))).sum(0) / total  # of logit - top
    return top + total.log(), targets.sum(0), total.log() - mean


def _gradient(
    logits: torch.Tensor,
    columns: torch.Tensor,
    log_sums: torch.Tensor,
    entropies: torch.Tensor,
    grads: torch.Tensor,
) -> torch.Tensor:
    """By the logits, for gradients ``[2, c]`` of the log-probability and of the entropy.

    d log p_t / d l_j = [j = t] - p_j, and d H / d l_j = -p_j (log p_j + H).
    """
    of_label, of_entropy = grads
    log_p = logits.sub_(log_sums[:, None])
    p = log_p.exp()
    log_p.add_(entropies[:, None]).mul_(of_entropy[:, None]).add_(of_label[:, None])
    dlogits = log_p.mul_(p).neg_()
    column, here = inside(columns, logits.shape[1])
    return dlogits.scatter_add_(1, column[:, None], (of_label * here)[:, None])


class _LinearLogProbs(torch.autograd.Function):
    """See `linear_log_probs`; gives ``[1, n]``, or ``[2, n]`` with entropies."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        group: dist.ProcessGroup | None,
        chunk: int,
        main_grad: torch.Tensor | None,
        with_entropies: bool,
    ) -> torch.Tensor:
        rows = rows_for(weight.device, weight.dtype)
        columns = labels - rank_in(group) * len(weight)
        dtype = torch.promote_types(weight.dtype, torch.float32)
        log_sums = torch.empty(len(hidden), dtype=dtype, device=hidden.device)
        found = log_sums.new_empty(1 + with_entropies, len(hidden))
        buffer = weight.new_empty(chunk, len(weight))
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            logits = torch.mm(hidden[part], weight.t(), out=buffer[: len(hidden[part])])
            if with_entropies:
                parts = of_all_parts(_statistics(logits.to(dtype), columns[part]), group)
                log_sums[part], targets, found[1, part] = _combined(parts)
            else:
                _, figures = rows.statistics(logits, columns[part])
                log_sums[part], targets = over_the_vocabulary(figures, group)
            found[0, part] = targets - log_sums[part]
        ctx.save_for_backward(hidden, weight, columns, log_sums, found)
        ctx.chunk, ctx.main_grad = chunk, main_grad
        return found

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, columns, log_sums, found = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        rows = rows_for(weight.device, weight.dtype)
        dhidden = torch.empty_like(hidden) if needs_hidden else None
        dweight = ctx.main_grad
        if dweight is None and needs_weight:
            dweight = torch.zeros_like(weight, dtype=log_sums.dtype)
        grad = grad.to(log_sums.dtype)
        buffer = weight.new_empty(ctx.chunk, len(weight))
        for start in range(0, len(hidden), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logits = torch.mm(hidden[part], weight.t(), out=buffer[: len(hidden[part])])
            if len(found) == 2:
                own = logits.to(log_sums.dtype, copy=True)
                scores = _gradient(
                    own, columns[part], log_sums[part], found[1, part], grad[:, part]
                )
            else:
                scores, figures = rows.statistics(logits, columns[part])
                weights = -grad[0, part]  # rows' gradients are of losses
                rows.gradient(scores, figures, columns[part], log_sums[part], weights)
            dlogits = scores.to(weight.dtype)
            if dhidden is not None:
                torch.mm(dlogits, weight, out=dhidden[part])
            if dweight is not None:
                add_product(dweight, dlogits.t(), hidden[part])
        if ctx.main_grad is not None:
            dweight = weight if needs_weight else None
        elif dweight is not None:
            dweight = dweight.to(weight.dtype)
        return dhidden, dweight, *[None] * 5

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
    over_the_vocabulary,
    rank_in,
    rows_for,
)


def linear_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    logits_bytes: int | None = None,
    main_grad: torch.Tensor | None = None,
) -> torch.Tensor:
    """Log-probabilities of labels under ``softmax(hidden @ weight.T)``.

    Differentiable by `hidden` and `weight`, once. With a group, all its ranks must make the same of
    the result; each gets the gradient of its own part of the weights, and of the hidden states the
    *part* that comes through it: the caller sums these over the ranks.

    With `main_grad` backward adds the weights' gradient to it. If `weight` wants a gradient, it
    gets the weights themselves in its place, which nobody may read.

    The arguments are those of `linear_cross_entropy`.

    Returns:
        ``[n]`` nats, at most 0; float32 or (for float64 weights) float64; equal on all ranks of
        the group.

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
    found: torch.Tensor = _LinearLogProbs.apply(hidden, weight, labels, group, chunk, main_grad)
    return found


class _LinearLogProbs(torch.autograd.Function):
    """See `linear_log_probs`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        group: dist.ProcessGroup | None,
        chunk: int,
        main_grad: torch.Tensor | None,
    ) -> torch.Tensor:
        rows = rows_for(weight.device, weight.dtype)
        columns = labels - rank_in(group) * len(weight)
        dtype = torch.promote_types(weight.dtype, torch.float32)
        log_sums = torch.empty(len(hidden), dtype=dtype, device=hidden.device)
        targets = torch.empty_like(log_sums)
        buffer = weight.new_empty(chunk, len(weight))
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            logits = torch.mm(hidden[part], weight.t(), out=buffer[: len(hidden[part])])
            _, figures = rows.statistics(logits, columns[part])
            log_sums[part], targets[part] = over_the_vocabulary(figures, group)
        ctx.save_for_backward(hidden, weight, columns, log_sums)
        ctx.chunk, ctx.main_grad = chunk, main_grad
        return targets - log_sums

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, columns, log_sums = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        rows = rows_for(weight.device, weight.dtype)
        dhidden = torch.empty_like(hidden) if needs_hidden else None
        dweight = ctx.main_grad
        if dweight is None and needs_weight:
            dweight = torch.zeros_like(weight, dtype=log_sums.dtype)
        weights = -grad.to(log_sums.dtype)  # rows' gradients are of losses
        buffer = weight.new_empty(ctx.chunk, len(weight))
        for start in range(0, len(hidden), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logits = torch.mm(hidden[part], weight.t(), out=buffer[: len(hidden[part])])
            scores, figures = rows.statistics(logits, columns[part])
            rows.gradient(scores, figures, columns[part], log_sums[part], weights[part])
            dlogits = scores.to(weight.dtype)
            if dhidden is not None:
                torch.mm(dlogits, weight, out=dhidden[part])
            if dweight is not None:
                add_product(dweight, dlogits.t(), hidden[part])
        if ctx.main_grad is not None:
            dweight = weight if needs_weight else None
        elif dweight is not None:
            dweight = dweight.to(weight.dtype)
        return dhidden, dweight, None, None, None, None

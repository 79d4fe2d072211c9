"""Cross entropy straight from hidden states: a linear layer's logits exist only chunk by chunk.

Each chunk's logits are made, turned in place into the loss's gradient by them, multiplied into the
gradients of hidden states and weights, and overwritten by the next chunk's. Gradients are made **in
the forward**, for a loss of weight 1, and backward only scales them. It follows that the loss must
be *one number*: with one a token, backward would have to weigh tokens inside a sum over them that
is already taken. Reasons: `docs/design/loss.md`.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from subprocess import SubprocessError
from typing import Any

import torch
import torch.distributed as dist

from megatron_hdp.runtime.loss.rows import TorchRows
from megatron_hdp.runtime.loss.sums import LossSums

LOGITS_BYTES = {"cpu": 2**24, "cuda": 2**30}
"""Most bytes that a chunk's logits take, by device.

A chunk of `c` tokens costs `6 c V H` operations and moves the float32 sum of the weights' gradient,
`8 V H` bytes: on an H200 (about 700 TFLOP/s, 4 TB/s) that adds `230 / c` of the time if nothing
overlaps. 1 GiB of bfloat16 logits over 128K entries are 4,096 tokens, 6%; twice the bytes would
save 3% more. On a CPU 16 MiB measured fastest, about
what a cache holds between the passes over it.
"""

_EVEN_TOKENS = 64  # chunks but the last are a multiple of this, where the bound allows it


def rows_for(device: torch.device, dtype: torch.dtype) -> TorchRows:
    """The elementwise work for logits of this kind: Triton kernels on GPUs, else plain PyTorch."""
    if device.type != "cuda" or dtype == torch.float64:
        return TorchRows()
    return _triton_rows(device)


@functools.cache
def _triton_rows(device: torch.device) -> TorchRows:
    """Triton's kernels if they work here; otherwise the plain version, and a warning."""
    if importlib.util.find_spec("triton") is None:
        reason = "triton is not installed"
    else:
        from megatron_hdp.runtime.loss.triton_cross_entropy import TritonRows

        rows = TritonRows()
        nothing = torch.zeros(1, dtype=torch.int64, device=device)
        try:
            rows.statistics(torch.zeros(1, 16, device=device), nothing)
            return rows
        except (RuntimeError, OSError, SubprocessError) as error:  # no C compiler, no Python.h
            reason = f"triton cannot compile here ({error})"
    warnings.warn(
        f"{reason}: the fused loss works in plain PyTorch, which is slower and takes three times a "
        "chunk's memory",
        stacklevel=2,
    )
    return TorchRows()


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    loss_mask: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    logits_bytes: int | None = None,
    sums: LossSums | None = None,
    main_grad: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum of the cross entropies of ``hidden @ weight.T`` over the tokens that carry loss.

    Differentiable by `hidden` and `weight`, once. With a group, each rank gets the gradient of its
    own part of the weights, and of the hidden states the *part* that comes through it: the caller
    sums these over the ranks.

    With `main_grad` no gradient of the weights is made: what they would get for a loss of weight 1
    is added to `main_grad` in the forward, and backward must follow once, with a gradient of 1. If
    `weight` wants a gradient, it gets the weights themselves in its place, which nobody may read:
    whoever waits for one (Megatron's DDP) is called, and nothing is allocated.

    Args:
        hidden: ``[t, H]``, the same on all ranks of the group.
        weight: ``[V / ranks, H]``, this rank's slice of the vocabulary; logits are as precise.
        labels: ``[t]`` token ids, anything where no loss is carried.
        loss_mask: ``[t]`` bool, true where the token carries loss.
        group: the ranks that share the vocabulary, or None where it is whole.
        logits_bytes: bound of a chunk's logits in bytes, by default `LOGITS_BYTES` of the device.
        sums: where losses are added up by group, too.
        main_grad: ``[V / ranks, H]``, float32 or (for float64 weights) float64, in which the
            weights' gradients of all micro-batches are summed; it is added to only where gradients
            are recorded.

    Returns:
        Scalar, float32 or (for float64 weights) float64, equal on all ranks of the group.

    Raises:
        ValueError: shapes that do not belong together.
        RuntimeError: backward runs twice, or with `main_grad` for a loss of another weight than 1.
    """
    num_tokens = len(hidden)
    if labels.shape != (num_tokens,) or loss_mask.shape != (num_tokens,):
        raise ValueError(
            f"found hidden states {tuple(hidden.shape)}, labels {tuple(labels.shape)}, loss mask "
            f"{tuple(loss_mask.shape)}; expected one label and one mask entry a hidden state"
        )
    chunk = chunk_of(hidden, weight, logits_bytes)
    learns = torch.is_grad_enabled()  # inside of a Function it is always off
    return _LinearCrossEntropy.apply(
        hidden.to(weight.dtype), weight, labels, loss_mask, group, chunk, learns, sums, main_grad
    )


def chunk_of(hidden: torch.Tensor, weight: torch.Tensor, logits_bytes: int | None) -> int:
    """Tokens of a chunk whose logits take so many bytes, or `LOGITS_BYTES` of the device."""
    if logits_bytes is None:
        logits_bytes = LOGITS_BYTES.get(weight.device.type, LOGITS_BYTES["cpu"])
    return chunk_tokens(len(hidden), len(weight) * weight.itemsize, logits_bytes)


def chunk_tokens(num_tokens: int, bytes_a_token: int, logits_bytes: int) -> int:
    """Tokens of a chunk: as few chunks as the bound allows, of nearly equal size."""
    most = max(1, logits_bytes // bytes_a_token)
    if num_tokens <= most:
        return max(1, num_tokens)
    num_chunks = -(-num_tokens // most)
    even = -(-num_tokens // num_chunks)
    return min(most, -(-even // _EVEN_TOKENS) * _EVEN_TOKENS)


class _LinearCrossEntropy(torch.autograd.Function):
    """See `linear_cross_entropy`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        loss_mask: torch.Tensor,
        group: dist.ProcessGroup | None,
        chunk: int,
        learns: bool,
        sums: LossSums | None,
        main_grad: torch.Tensor | None,
    ) -> torch.Tensor:
        rows = rows_for(weight.device, weight.dtype)
        dtype = torch.promote_types(weight.dtype, torch.float32)
        weights = loss_mask.to(dtype)
        columns = labels - rank_in(group) * len(weight)
        losses = torch.empty_like(weights)
        dhidden = torch.empty_like(hidden) if learns and ctx.needs_input_grad[0] else None
        dweight = main_grad if learns else None
        if learns and main_grad is None and ctx.needs_input_grad[1]:
            dweight = torch.zeros_like(weight, dtype=dtype)
        buffer = weight.new_empty(chunk, len(weight))
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            logits = buffer[: len(hidden[part])]
            torch.mm(hidden[part], weight.t(), out=logits)
            scores, figures = rows.statistics(logits, columns[part])
            log_sums, targets = over_the_vocabulary(figures, group)
            losses[part] = log_sums - targets
            if dhidden is None and dweight is None:
                continue
            rows.gradient(scores, figures, columns[part], log_sums, weights[part])
            dlogits = scores.to(weight.dtype)
            if dhidden is not None:
                torch.mm(dlogits, weight, out=dhidden[part])
            if dweight is not None:
                add_product(dweight, dlogits.t(), hidden[part])
        ctx.weight = weight.detach()
        ctx.in_main_grad = main_grad is not None
        # not saved tensors: they are ours to scale in place
        ctx.gradients = dhidden, None if ctx.in_main_grad else dweight
        losses *= weights
        if sums is not None:
            sums.add(losses)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("backward through the fused loss works once: run forward again")
        dhidden, dweight = ctx.gradients
        ctx.gradients = None
        grad = grad.reshape(())
        if ctx.in_main_grad:
            torch._assert_async(grad == 1, "the loss whose gradient is in main_grad has weight 1")
            dweight = ctx.weight.detach() if ctx.needs_input_grad[1] else None
        elif dweight is not None and dweight.dtype == ctx.weight.dtype:
            dweight.mul_(grad)
        elif dweight is not None:  # scaled before it is rounded, without a float32 copy
            rounded = torch.empty_like(dweight, dtype=ctx.weight.dtype)
            dweight = torch.mul(dweight, grad, out=rounded)
        if dhidden is not None:
            dhidden.mul_(grad)
        return dhidden, dweight, *[None] * 7


def rank_in(group: dist.ProcessGroup | None) -> int:
    """This rank's place in a group, 0 without one."""
    return 0 if group is None else dist.get_rank(group)


def over_the_vocabulary(
    figures: torch.Tensor, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log of the sum of exp, label's logit), ``[c]`` each, of all ranks' parts together.

    One all-gather instead of an all-reduce for the maximum and another for the sums: three numbers
    a token, and every rank adds them in the same order.
    """
    largest, sums, targets = of_all_parts(figures, group).unbind(1)
    top = largest.amax(0)
    return top + (sums * (largest - top).exp()).sum(0).log(), targets.sum(0)


def of_all_parts(figures: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Figures ``[k, c]`` of each rank's part of the vocabulary, ``[ranks, k, c]``."""
    size = 1 if group is None else dist.get_world_size(group)
    if size == 1:
        return figures[None]
    gathered = figures.new_empty(size * len(figures), figures.shape[1])
    dist.all_gather_into_tensor(gathered, figures, group=group)
    return gathered.view(size, *figures.shape)


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """``total += left @ right``, the product not rounded to the factors' precision."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.device.type != "cuda":
        total.addmm_(left.to(total.dtype), right.to(total.dtype))
    elif _adds_to_float32(total.device, left.dtype):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += torch.mm(left, right, out_dtype=total.dtype)


@functools.cache
def _adds_to_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether PyTorch adds products of `dtype` to a float32 sum; 2.8 refuses, later ones do."""
    total = torch.zeros(16, 16, device=device)
    factor = torch.zeros(16, 16, device=device, dtype=dtype)
    try:
        torch.addmm(total, factor, factor, out_dtype=torch.float32, out=total)
    except RuntimeError as error:
        warnings.warn(
            f"this PyTorch cannot add a product of {dtype} to a float32 sum ({error}): the fused "
            "loss takes another copy of the output weights' gradient",
            stacklevel=2,
        )
        return False
    return True

"""What ranks did in a step of a session, put together, and whether it may be used."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_hdp.data.steps import RankMicroBatch
from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.execution import RankOutcome
from megatron_hdp.megatron.parallel import RankPlace
from megatron_hdp.megatron.step import (
    NonFinite,
    NonFiniteError,
    gather_words,
    non_finite_parameters,
    over_all_ranks,
)
from megatron_hdp.planner import Plan


@dataclass(frozen=True, kw_only=True)
class SessionReport:
    """A step over all ranks; the same on each."""

    loss: float
    """Sum over the tokens with loss of the global batch, divided by `divisor`."""
    divisor: float
    sums: Mapping[str, float]
    """Figures that a loss of the caller's returned, summed over the same tokens, not divided."""
    sequences: int
    tokens: int
    loss_tokens: int
    """Tokens with loss."""
    plan: Plan
    """What ran."""
    makespan_s: float
    """Seconds from the start of the step until the last rank reached gradient sync."""
    ring_bytes: int
    """Bytes that all ranks sent around rings, forward and backward."""
    offloaded_bytes: int
    """Bytes of activations, of all ranks, that waited in host memory."""
    mtp_loss: float | None
    """Nats: mean loss of multi-token prediction over its depths; None where there is none."""


def totals_of(outcome: RankOutcome, place: RankPlace, has_sums: bool) -> dict[str, float]:
    """Sums and maxima over all ranks; tensor-parallel ranks hold the same loss."""
    job = over_all_ranks(
        sums={
            "loss": sum(outcome.losses),
            "further losses": sum(outcome.further_losses),
            "ring_bytes": outcome.ring_bytes,
            "offloaded_bytes": outcome.offloaded_bytes,
            "ranks with sums": has_sums,
        },
        maxima={"makespan_s": outcome.until_sync_s},
        device=parallel.compute_device(),
    )
    return job | {"loss": job["loss"] / place.num_tensor_ranks}


def require_finite_loss(
    total: float, micro_batches: Sequence[RankMicroBatch], losses: Sequence[float]
) -> None:
    """Raises on every rank, naming sequences, if the loss of a micro-batch is NaN or infinite."""
    if math.isfinite(total):
        return
    found = []
    for one, loss in zip(micro_batches, losses, strict=False):
        if not math.isfinite(loss):
            where = f"sequences {', '.join(map(str, one.sequence_ids))} of the batch"
            found.append(NonFinite(one.index, f"loss {loss}", where))
    lines = "\n  ".join(gather_words(found))
    raise NonFiniteError(
        f"the loss is {total}, expected a finite number: leave the optimizer's step out, look at "
        f"these sequences, or go back to earlier weights\n  {lines}"
    )


def added_up(found: torch.Tensor, to: str) -> torch.Tensor | None:
    """Sums of what each rank holds a part of, on the CPU; None on ranks that are to get none."""
    found = found.to(parallel.compute_device())
    if to == "all":
        dist.all_reduce(found)  # of every token one rank has more than 0
        return found.cpu()
    dist.reduce(found, 0)
    return found.cpu() if parallel.is_first_rank() else None


def clear_gradients(chunks: Sequence[Any], parameters: Sequence[torch.nn.Parameter]) -> None:
    """Of a model and of a loss; some of Megatron's optimizers leave theirs in ``grad``."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    for one in (*parameters, *(one for chunk in chunks for one in chunk.parameters())):
        one.grad = None


def finish_gradients(
    chunks: Sequence[Any],
    parameters: Sequence[torch.nn.Parameter],
    place: RankPlace,
    divisor: float,
) -> None:
    """Completes the gradients of a loss's own parameters, and looks at those of the model.

    Args:
        chunks: of this rank, with gradients that are summed over ranks and divided.
        parameters: of the loss, with this rank's part of their gradients.
        place: of this rank.
        divisor: of the gradients.
    """
    if place.is_last_stage:
        for one in parameters:
            gradient = torch.zeros_like(one) if one.grad is None else one.grad
            parallel.sum_over_hdp_ranks(gradient)
            one.grad = gradient / divisor
    names = non_finite_parameters(chunks)
    if names:
        raise NonFiniteError(
            f"the gradient is NaN or infinite, first in {', '.join(names)}, expected finite "
            "numbers: leave the optimizer's step out, and go back to earlier weights"
        )
